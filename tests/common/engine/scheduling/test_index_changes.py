"""What of a worker's blocks the prefix index has to hear."""

import pytest

from common.engine.scheduling.index_changes import IndexChanges
from common.values.ids import BlockHash

A, B = BlockHash(b"a"), BlockHash(b"b")


def test_what_became_findable_and_what_went_is_said_once() -> None:
    changes = IndexChanges()
    changes.stored(A)
    changes.evicted([B])
    assert changes.take() == ((A,), (B,))
    assert changes.take() == ((), ())


def test_a_hash_that_came_and_went_between_two_calls_is_not_announced_nor_the_reverse() -> None:
    changes = IndexChanges()
    changes.stored(A)
    changes.evicted([A, B])
    changes.stored(B)
    assert changes.take() == ((), ())


def test_one_that_is_stored_twice_is_a_bug() -> None:
    changes = IndexChanges()
    changes.stored(A)
    with pytest.raises(AssertionError, match="twice"):
        changes.stored(A)
