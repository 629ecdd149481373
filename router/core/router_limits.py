"""Bounds and times of the router core. Values only."""

from dataclasses import dataclass

from common.values.config import RouterConfig


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """How much, how often and how long; see RouterConfig for the configurable ones."""

    local_prefill_max_tokens: int = 0
    max_num_queued: int = 256
    balance_prefill_max_tokens: int = 0
    max_retries: int = 3
    num_kept_requests: int = 1000
    worker_silence_s: float = 4.0
    pair_grace_s: float = 3.0
    # The index answers within 50 ms or not at all; later the request goes on without.
    lookup_timeout_s: float = 0.2
    # All tokens are out, but the prefill worker's message about the first ones is not here yet: it is on its way.
    account_wait_s: float = 0.5
    # One death hits every request of a worker at once, so the burst is large; what follows is slow.
    retry_burst: float = 512.0
    retries_per_s: float = 20.0
    # A deadline noticed this late means that the router itself stood still, and silence of others proves nothing.
    stall_s: float = 1.0

    @classmethod
    def of(cls, config: RouterConfig) -> "RouterLimits":
        return cls(
            local_prefill_max_tokens=config.local_prefill_max_tokens,
            balance_prefill_max_tokens=config.balance_prefill_max_tokens if config.local_prefill_max_tokens else 0,
            max_num_queued=config.max_num_queued,
            max_retries=config.max_retries,
            num_kept_requests=config.keep_requests,
            worker_silence_s=config.worker_silence_s,
            pair_grace_s=config.pair_grace_s,
        )
