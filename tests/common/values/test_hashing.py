"""The chain of block hashes: covers every input, ambiguous for none, the same in every process."""

import os
import subprocess
import sys

import pytest

from common.values.hashing import block_hashes, extend_block_hashes, hash_root
from common.values.ids import BlockHash

FIELDS = {"model": "abc", "dtype": "float32", "tokenizer": "t"}
ROOT = hash_root(FIELDS, 16)
VECTOR_ROOT = "fdf813f9ec9c08b5dce66a476ca5c800b5309d7d42a10e875e16ac16698373af"
VECTOR_BLOCK = "07b191d6e5271d7e5751dd0d408ccdd5ab76638be8c7ab7403b2d4b183e38ae3"
TOKENS = tuple(range(100, 116))


def last_hash(token_ids: tuple[int, ...], root: BlockHash = ROOT, block_size: int = 16) -> bytes:
    return block_hashes(token_ids, block_size, root)[-1]


def test_hash_covers_every_token_parent_salt_field_and_block_size() -> None:
    hashes = [last_hash(TOKENS)]
    hashes += [last_hash((*TOKENS[:i], TOKENS[i] + 1, *TOKENS[i + 1 :])) for i in range(16)]
    hashes.append(last_hash(TOKENS + TOKENS))
    hashes.append(last_hash(TOKENS, hash_root(FIELDS, 16, b"tenant")))
    hashes += [last_hash(TOKENS, hash_root({**FIELDS, name: "other"}, 16)) for name in FIELDS]
    hashes += [last_hash(TOKENS, hash_root(FIELDS, 16, adapter=digest)) for digest in ("x", "y")]
    hashes.append(last_hash(TOKENS, hash_root(FIELDS, 16, b"x", "y")))
    hashes.append(last_hash(TOKENS, hash_root(FIELDS, 8), block_size=8))
    assert len(hashes) == 26
    assert len(set(hashes)) == 26


def test_no_two_inputs_share_an_encoding() -> None:
    def salted(model: str, salt: bytes) -> bytes:
        return hash_root({"model": model}, 16, salt)

    assert block_hashes([1, 23], 2, ROOT) != block_hashes([12, 3], 2, ROOT)
    assert salted("bc", b"a") != salted("c", b"ab")
    assert salted("a", b"") != salted("a", b"\0")
    assert hash_root({"a": "bc"}, 16) != hash_root({"ab": "c"}, 16)
    assert hash_root({"a": "b", "c": "d"}, 16) != hash_root({"a": "bcd"}, 16)
    assert hash_root({}, 16) != hash_root({}, 17)


def test_order_of_fields_does_not_matter() -> None:
    assert hash_root({"a": "1", "b": "2"}, 16) == hash_root({"b": "2", "a": "1"}, 16)


@pytest.mark.parametrize(("bad", "error"), [(True, TypeError), (1.0, TypeError), (-1, ValueError), (2**32, ValueError)])
def test_only_unsigned_ints_are_hashed(bad: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        block_hashes([0, bad], 2, ROOT)


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(block_hashes(list(range(n)), 16, ROOT)) for n in (0, 1, 15, 16, 17, 31, 32)] == [0, 0, 0, 1, 1, 1, 2]


def test_extending_step_by_step_equals_hashing_at_once() -> None:
    tokens = list(range(67))
    hashes: list[BlockHash] = []
    for end in range(len(tokens) + 1):
        extend_block_hashes(hashes, tokens[:end], 16, ROOT)
    assert hashes == block_hashes(tokens, 16, ROOT)


def test_known_vector_does_not_change() -> None:
    """The index outlives processes and versions: a change of these bytes needs a new tag."""
    assert hash_root({"model": "m"}, 4, b"s").hex() == VECTOR_ROOT
    assert block_hashes([1, 2, 3, 4], 4, hash_root({"model": "m"}, 4, b"s"))[0].hex() == VECTOR_BLOCK


def test_hashes_are_equal_in_every_process() -> None:
    program = (
        "from common.values.hashing import *;"
        "print([h.hex() for s in (b'', b'salt') for h in"
        " block_hashes(list(range(80)), 16, hash_root({'b': '1', 'a': '2'}, 16, s))])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("'") == 2 * 2 * 5
