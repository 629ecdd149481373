"""Whether a worker can take another role around the weights that it has loaded. Pure: no IO.

What only sizes or paces a role may differ, and is built anew with it: the KV cache, the queues, the sessions. What
belongs to the place of the process stays as it is, whatever is configured for the other role. Whatever decides what
the weights and a token's KV are, or which cluster the worker belongs to, must be equal. A setting that is not listed
here must be equal: nothing new is let through by accident.
"""

from common.values.config import WorkerConfig
from common.values.errors import PdserveError

# The cores that a process got, the address by which others reach it, and where its metrics are scraped.
OF_THE_PLACE = frozenset({"num_threads", "cpus", "host", "metrics_port", "num_gpus"})
MAY_DIFFER = frozenset(
    {
        *("role", "worker_id", "port"),
        *("block_size", "num_blocks", "kv_cache_bytes", "gpu_memory_utilization"),
        *("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "gap_budget_s", "max_step_s", "lease_s"),
        *("speculation", "max_draft_tokens", "max_loras"),
        *(
            "transport",
            "digest",
            "plain_nccl",
            "min_chunk_bytes",
            "max_inflight_bytes",
            "min_link_bytes_per_s",
            "link_timeout_s",
        ),
    }
)
# May hold a password: a refusal is logged and shown.
SECRET = frozenset({"redis_url"})


class RoleChangeRefused(PdserveError):
    """The weights cannot serve the other role as it is configured; the message names the setting."""


def check_role_change(now: WorkerConfig, then: WorkerConfig) -> None:
    """Raise RoleChangeRefused unless a worker of `now` can become one of `then` without loading."""
    for name in type(now).model_fields:
        here, there = getattr(now, name), getattr(then, name)
        if name in MAY_DIFFER | OF_THE_PLACE or here == there:
            continue
        if name in SECRET:
            raise RoleChangeRefused(f"{name}: one as {now.role}, another as {then.role}")
        raise RoleChangeRefused(f"{name}: {here!r} as {now.role}, {there!r} as {then.role}")


def at_the_place_of(now: WorkerConfig, then: WorkerConfig) -> WorkerConfig:
    """`then`, for the process that `now` runs in."""
    return then.model_copy(update={name: getattr(now, name) for name in OF_THE_PLACE})
