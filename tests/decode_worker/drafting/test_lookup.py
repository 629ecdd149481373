"""What stood behind the same tokens before, found by an index."""

import random

from decode_worker.drafting.lookup import MAX_NEW, MAX_PLACES, MIN_MATCH, SEPARATOR, Lookup, Place


def lookup_of(token_ids: list[int]) -> Lookup:
    lookup = Lookup(token_ids)
    for _ in range(0, len(token_ids) + 1, MAX_NEW):
        lookup.update()
    return lookup


def test_the_place_behind_the_same_tokens_is_found() -> None:
    lookup = lookup_of([9, 1, 2, 3, 4, 5, 8, 1, 2, 3])
    assert lookup.find([7, 1, 2, 3]) == Place(4, 3)
    assert lookup.after(4, 3) == [4, 5, 8]
    assert lookup.find([1, 2, 4]) is None
    assert lookup.find([3]) is None


def test_the_end_of_the_text_itself_is_no_place() -> None:
    assert lookup_of([4, 5, 6]).find([4, 5, 6]) is None


def test_the_longest_match_is_taken_and_of_equal_ones_the_newest() -> None:
    longest_first = [7, 1, 2, 3, 10, 8, 1, 2, 3, 11]
    assert lookup_of(longest_first).find([7, 1, 2, 3]) == Place(4, 4)
    assert lookup_of(longest_first).find([6, 1, 2, 3]) == Place(9, 3)


def test_nothing_follows_a_separator() -> None:
    lookup = lookup_of([1, 2, 3, 4, SEPARATOR, 5, 6, 7, 8])
    assert lookup.after(3, 5) == [4]
    assert lookup.after(4, 5) == []


def test_the_index_finds_what_a_search_of_the_whole_text_finds() -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = [rng.randrange(4) for _ in range(rng.randint(3, 60))]
        place = lookup_of(text).find(text)
        places = [idx for idx in range(MIN_MATCH, len(text)) if text[idx - MIN_MATCH : idx] == text[-MIN_MATCH:]]
        newest = places[-MAX_PLACES:]
        assert (place is None) == (not places)
        if place is not None:
            assert place == max(
                (Place(idx, matching(text, idx)) for idx in newest), key=lambda p: (p.num_matching, p.idx)
            )


def matching(text: list[int], idx: int) -> int:
    num = 0
    while num < min(32, idx) and text[idx - 1 - num] == text[-1 - num]:
        num += 1
    return num


def test_a_long_text_is_taken_in_over_several_calls() -> None:
    text = list(range(2 * MAX_NEW))
    lookup = Lookup(text)
    lookup.update()
    assert lookup.find(text[MAX_NEW : MAX_NEW + 3]) is None
    end = [text[-4], text[-3], text[-2]]
    assert lookup.find(end) is None
    lookup.update()
    assert lookup.find(end) is not None
