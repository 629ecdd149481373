"""Turns between tenants: by what each has had, whatever the lengths; one alone gets everything."""

import random
from collections import Counter

from common.cores.fair_shares import FairShares


def served(shares: FairShares, lines: dict[str, list[int]], num_tokens: int) -> Counter[str]:
    """Tokens of each tenant when so many are served in turn; a line holds the tokens of each request."""
    got: Counter[str] = Counter()
    items = {tenant: [(tenant, length) for length in line] for tenant, line in lines.items()}
    for tenant, length in shares.in_turn(items):
        if got.total() >= num_tokens:
            break
        got[tenant] += length
        shares.charge(tenant, length)
    return got


def test_tenants_get_equal_tokens_whatever_the_lengths_and_numbers_of_their_requests() -> None:
    rng = random.Random(1)
    for _ in range(50):
        lengths = {tenant: rng.randint(1, 300) for tenant in "abc"}
        shares = FairShares()
        shares.begin(set("abc"))
        got = served(shares, {tenant: [lengths[tenant]] * 3000 for tenant in "abc"}, 9000)
        assert max(got.values()) - min(got.values()) <= 2 * max(lengths.values())


def test_one_alone_gets_everything_in_its_own_order() -> None:
    shares = FairShares()
    shares.begin({"a"})
    assert list(shares.in_turn({"a": [3, 1, 2]})) == [3, 1, 2]


def test_a_tenant_that_comes_has_neither_credit_nor_debt() -> None:
    """1. a is served alone for long; 2. b comes and gets its turn, not all turns; 3. it leaves and comes again."""
    shares = FairShares()
    shares.begin({"a"})
    shares.charge("a", 1_000_000)
    for _ in range(2):
        shares.begin({"a", "b"})
        assert served(shares, {"a": [10] * 99, "b": [10] * 99}, 100) == {"a": 50, "b": 50}
        shares.begin({"a"})


def test_what_is_passed_over_is_not_charged_and_does_not_end_its_tenants_turns() -> None:
    shares = FairShares()
    shares.begin({"a", "b"})
    turns = shares.in_turn({"a": ["a1", "a2"], "b": ["b1"]})
    assert next(turns) in ("a1", "b1")  # too large now, say
    assert len(list(turns)) == 2


def test_of_equals_the_one_that_came_last_is_first() -> None:
    shares = FairShares()
    shares.begin({"a"})
    shares.charge("a", 70)
    shares.begin({"a", "b"})
    assert list(shares.in_turn({"a": ["a1"], "b": ["b1"]})) == ["b1", "a1"]
