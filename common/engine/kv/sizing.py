"""How many blocks each group of layers gets, and how long a sequence in them can be. Pure: no torch.

A sequence has in a group with a window its last window, and the window that moves on with what is computed of it: two
windows and two blocks, as either may begin within one. The rest of the memory goes to the groups without a window.
"""

from dataclasses import dataclass

from common.engine.contract.kv_spec import KVGroup, KVSpec


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is at once: sequences of up to `max_len` tokens, of which a step computes `max_chunk` in all."""

    max_len: int
    max_num_seqs: int
    max_chunk: int


def num_blocks_that_fit(kv_cache_bytes: int, spec: KVSpec, demand: Demand) -> tuple[int, ...]:
    """Blocks of each group in a budget. Raises ValueError when a group gets none.

    A group with a window has room for as many sequences as may run, if the others then have as many tokens as it has,
    and for one sequence of `max_len`; else for fewer.
    """
    needed = max(_blocks_of_sequence(group, spec.block_size, demand.max_len) for group in spec.groups)
    for num_seqs in range(demand.max_num_seqs, 0, -1):
        wanted = [_blocks_at_once(group, spec.block_size, demand, num_seqs) for group in spec.groups]
        counts = _split(kv_cache_bytes, spec, wanted)
        if _is_widest(spec, counts) and max(counts) >= needed:
            return counts
    alike = kv_cache_bytes // spec.bytes_per_block
    if alike < 1:
        raise ValueError(f"kv_cache_bytes={kv_cache_bytes} is less than one block of {spec.block_size} tokens")
    wanted = [min(alike, _blocks_at_once(group, spec.block_size, demand, 1)) for group in spec.groups]
    return _split(kv_cache_bytes, spec, wanted)


def num_blocks_asked_for(num_blocks: int, spec: KVSpec, demand: Demand) -> tuple[int, ...]:
    """Blocks of each group where a number is configured: with a window no more than running sequences need."""
    most = (_blocks_at_once(group, spec.block_size, demand, demand.max_num_seqs) for group in spec.groups)
    return tuple(min(num_blocks, count) if g.window else num_blocks for g, count in zip(spec.groups, most, strict=True))


def longest_sequence(spec: KVSpec, num_blocks: tuple[int, ...], limit: int) -> int:
    """Tokens of a sequence that has all blocks to itself, up to `limit`."""
    size = spec.block_size
    has_windows = (
        group.window and count >= _blocks_of_windows(group, size)
        for group, count in zip(spec.groups, num_blocks, strict=True)
    )
    return min(limit, *(limit if has else count * size for has, count in zip(has_windows, num_blocks, strict=True)))


def _blocks_of_windows(group: KVGroup, block_size: int) -> int:
    return 2 * (-(-group.window // block_size) + 1)


def _blocks_of_sequence(group: KVGroup, block_size: int, max_len: int) -> int:
    whole = -(-max_len // block_size)
    return min(whole, _blocks_of_windows(group, block_size)) if group.window else whole


def _blocks_at_once(group: KVGroup, block_size: int, demand: Demand, num_seqs: int) -> int:
    """Of so many sequences, and of the chunk that is computed of them."""
    return num_seqs * _blocks_of_sequence(group, block_size, demand.max_len) + -(-demand.max_chunk // block_size)


def _split(kv_cache_bytes: int, spec: KVSpec, wanted: list[int]) -> tuple[int, ...]:
    """What is wanted for groups with a window; the others, or without such the one that is widest, have the rest."""
    rest = _rest_window(spec)
    pairs = list(zip(spec.groups, wanted, strict=True))
    taken = sum(count * group.bytes_per_token for group, count in pairs if group.window != rest) * spec.block_size
    per_block = sum(group.bytes_per_token for group in spec.groups if group.window == rest) * spec.block_size
    left = max(0, kv_cache_bytes - taken) // per_block
    return tuple(left if group.window == rest else count for group, count in pairs)


def _rest_window(spec: KVSpec) -> int:
    windows = [group.window for group in spec.groups]
    return 0 if 0 in windows else max(windows)


def _is_widest(spec: KVSpec, counts: tuple[int, ...]) -> bool:
    """Whether the groups that have the rest have as many blocks as any other."""
    rest = _rest_window(spec)
    return max(counts) == max(count for group, count in zip(spec.groups, counts, strict=True) if group.window == rest)
