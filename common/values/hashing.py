"""Content hashes of full KV blocks: the key of the prefix cache and of the index. Pure: no IO.

A chain: hash of block i = sha256(tag, hash of block i - 1, number of tokens, token ids), and the parent of block 0
is a root that covers everything else the KV depends on. Fixed-width fields with lengths, so no two different inputs
share an encoding (CVE-2025-25183 was a prefix cache keyed by Python's `hash`). The same in every process, and easy
to repeat in another language. Router and workers call the same functions; a partial last block has no hash.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence

from common.values.ids import BlockHash

_ROOT_TAG = b"pdserve.prefix.root.1"
_BLOCK_TAG = b"\x01"


def hash_root(fields: Mapping[str, str], block_size: int, cache_salt: bytes = b"", adapter: str = "") -> BlockHash:
    """Parent of a chain's first block: what the KV depends on besides the tokens.

    `fields` name the model (digest, dtype, tokenizer: the fingerprint fields); their order does not matter.
    `cache_salt` separates tenants; empty = the shared cache. `adapter` is the digest of what changes the weights.
    """
    fields = {**fields, "adapter": adapter} if adapter else fields
    parts = [_ROOT_TAG, struct.pack("<IQ", block_size, len(fields))]
    for name in sorted(fields):
        parts += [_sized(name.encode()), _sized(fields[name].encode())]
    parts.append(_sized(cache_salt))
    return BlockHash(hashlib.sha256(b"".join(parts)).digest())


def block_hashes(token_ids: Sequence[int], block_size: int, root: BlockHash) -> list[BlockHash]:
    """One hash per full block of `token_ids`. Raises TypeError or ValueError unless all ids are ints in [0, 2^32)."""
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size, root)
    return hashes


def extend_block_hashes(hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: BlockHash) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet."""
    start = len(hashes) * block_size
    end = len(token_ids) - len(token_ids) % block_size
    if end <= start:
        return
    data = _pack(token_ids[start:end])
    parent: bytes = hashes[-1] if hashes else root
    header = struct.pack("<I", block_size)
    stride = 4 * block_size
    for offset in range(0, len(data), stride):
        parent = hashlib.sha256(_BLOCK_TAG + parent + header + data[offset : offset + stride]).digest()
        hashes.append(BlockHash(parent))


def _pack(token_ids: Sequence[int]) -> bytes:
    kinds = set(map(type, token_ids))
    if kinds - {int}:  # bool is an int to struct, and True == 1 must not hash alike
        raise TypeError(f"token ids must be ints, got {sorted(kind.__name__ for kind in kinds)}")
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError("token ids must be in [0, 2**32)") from error


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
