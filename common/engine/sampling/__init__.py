"""Logits and parameters to token ids.

Owns every rule between the model's logits and a drawn token. Randomness is a pure function of (seed, choice,
position, token id): no generator, no state, so any worker draws the same whatever else is in its batch.
"""

from common.engine.sampling.sampler import SampleError, sample

__all__ = ["SampleError", "sample"]
