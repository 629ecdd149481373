from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopScanner


def scan(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """Everything shown, piece by piece, and the match."""
    scanner = StopScanner(stops, include_stop=include_stop)
    shown = []
    for piece in pieces:
        result = scanner.push(piece)
        shown.append(result.text)
        if result.matched is not None:
            return shown, result.matched
    return [*shown, scanner.flush()], None


def naive(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The first complete stop string by definition: smallest end, then longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include_stop else end - len(stop)], stop


def test_a_stop_string_across_pieces_is_found_and_nothing_of_it_shown() -> None:
    shown, matched = scan(list("alpha END omega"), ["ND o"])
    assert matched == "ND o"
    assert "".join(shown) == "alpha E"


def test_only_a_possible_beginning_is_held_back() -> None:
    scanner = StopScanner(["END"], include_stop=False)
    assert scanner.push("hello E").text == "hello "
    assert scanner.push("NX").text == "ENX"
    assert scanner.num_held == 0


def test_held_text_is_shown_at_the_end() -> None:
    assert scan(["hello EN"], ["END"]) == (["hello ", "EN"], None)


def test_the_stop_string_is_included_on_request() -> None:
    assert scan(["one ST", "OP two"], ["STOP"], include_stop=True) == (["one ", "STOP"], "STOP")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert scan(["xabcd"], ["abcd", "bc"])[1] == "bc"
    assert scan(["xabc"], ["bc", "abc"])[1] == "abc"


def test_a_match_passed_over_does_not_hide_the_next_one() -> None:
    scanner = StopScanner(["aa"], include_stop=False)
    assert scanner.push("aa", may_stop=False).matched is None
    assert scanner.push("a").matched == "aa"


TEXT = st.text(alphabet="ab", max_size=24)


@given(TEXT, st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4), st.booleans(), st.data())
@settings(deadline=None)
def test_the_result_does_not_depend_on_the_cuts(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = scan(pieces, stops, include_stop=include)
    assert ("".join(shown), matched) == naive(text, stops, include_stop=include)


@given(TEXT, st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4))
@settings(deadline=None)
def test_what_is_held_back_is_the_longest_possible_beginning(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops, include_stop=False)
    if scanner.push(text).matched is None:
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert scanner.num_held == max(len(part) for part in beginnings if text.endswith(part))
