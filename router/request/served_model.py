"""What both front ends say about the model that the cluster serves. Pure: no IO."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.checkpoint import Checkpoint
from common.values.config import ModelConfig
from router.request import limits
from router.request.dialect import Dialect


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`generation_defaults` are the model authors' advice for sampling, as generation_config.json states it."""

    name: str
    path: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float | int]
    created_s: int = 0  # Unix time, for the model card
    dialect: Dialect = field(default_factory=Dialect)

    @property
    def max_body_bytes(self) -> int:
        """Of a request, unless the operator says otherwise: a prompt within the context does not fail on it."""
        return max(limits.MIN_BODY_BYTES, self.max_model_len * limits.BODY_BYTES_PER_TOKEN)

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, config: ModelConfig, created_s: int, dialect: Dialect | None = None
    ) -> "ServedModel":
        """The configured name and length win, but no length beyond what the model can do."""
        longest = checkpoint.config.max_position
        return cls(
            name=config.served_name or checkpoint.served_name,
            path=config.path,
            architecture=checkpoint.config.architecture,
            max_model_len=min(config.max_model_len or longest, longest),
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            generation_defaults=checkpoint.generation_defaults,
            created_s=created_s,
            dialect=dialect or Dialect.of(checkpoint.chat_template),
        )
