import pytest
from tokenizers import Tokenizer, decoders

from common.values.request import FinishReason, SampledToken
from router.text.choice_text import ChoiceDelta, ChoiceEnd, ChoiceText, Detokenizer, TextOptions
from tests.router.text.tokenizers_for_tests import EOS_ID, byte_ids, byte_tokenizer, piece_id, token_events

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def run(
    tokenizer: Tokenizer, token_ids: list[int], reason: FinishReason | None, options: TextOptions
) -> list[ChoiceDelta]:
    choice = ChoiceText(0, tokenizer, (), options)
    deltas = [choice.push(event) for event in token_events(token_ids, reason)]
    return [delta for delta in deltas if delta is not None]


def text_of(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_characters_of_several_tokens_come_out_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(tokenizer, "한😀é")]
    assert pieces == ["", "", "한", "", "", "", "😀", "", "é"]


def test_a_character_begun_in_the_prompt_is_finished(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "ab한")
    detokenizer = Detokenizer(tokenizer, ids[:3], skip_special_tokens=True)
    assert [detokenizer.push(token_id) for token_id in ids[3:]] == ["", "한"]


def test_half_a_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, byte_ids(tokenizer, "ok😀")[:-1], LENGTH, TextOptions())
    assert text_of(deltas) == "ok"
    assert sum(len(delta.tokens) for delta in deltas) == 5


def test_bytes_that_are_no_text_do_not_pile_up(tokenizer: Tokenizer) -> None:
    continuation = byte_ids(tokenizer, "é")[1]
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=True)
    pieces = [detokenizer.push(continuation) for _ in range(100)]
    assert 80 <= len("".join(pieces)) <= 100
    assert detokenizer.push(byte_ids(tokenizer, "x")[0]).endswith("x")


def test_a_leading_space_survives_behind_a_prompt() -> None:
    """SentencePiece drops the space at the start of a text; an answer is not the start."""
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1)])
    ids = byte_ids(tokenizer, "Hi you")
    with_prompt = Detokenizer(tokenizer, ids[:2], skip_special_tokens=True)
    assert "".join(with_prompt.push(token_id) for token_id in ids[2:]) == " you"


def test_a_stop_string_ends_the_choice_without_leaking(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, byte_ids(tokenizer, "alpha END omega"), None, TextOptions(stops=("ND o",)))
    assert text_of(deltas) == "alpha E"
    assert not any("N" in delta.text for delta in deltas)
    assert deltas[0].text == "a"
    assert deltas[-1].end == ChoiceEnd(STOP, len("alpha END o"), stop_string="ND o")


def test_tokens_are_shown_with_their_text_and_all_are_shown_once(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "alpha END o")
    deltas = run(tokenizer, ids, None, TextOptions(stops=("ND o",)))
    assert [token.token_id for delta in deltas for token in delta.tokens] == ids
    before_end = [token.token_id for delta in deltas[:-1] for token in delta.tokens]
    assert before_end == byte_ids(tokenizer, "alpha E")


@pytest.mark.parametrize("last", ["length", "eos"])
def test_a_held_tail_is_shown_at_the_end(tokenizer: Tokenizer, last: str) -> None:
    ids = byte_ids(tokenizer, "hello EN") + ([EOS_ID] if last == "eos" else [])
    reason = STOP if last == "eos" else LENGTH
    deltas = run(tokenizer, ids, reason, TextOptions(stops=("END",)))
    assert text_of(deltas) == "hello EN"
    assert deltas[-1].end == ChoiceEnd(reason, len(ids))


def test_text_behind_the_stop_inside_one_token_is_dropped(tokenizer: Tokenizer) -> None:
    """The token spells the stop string and more; two more tokens arrive before the halt lands."""
    ids = [piece_id(tokenizer, "END\n\nUser:"), *byte_ids(tokenizer, "xy")]
    deltas = run(tokenizer, ids, None, TextOptions(stops=("END",)))
    assert len(deltas) == 1
    assert deltas[0].text == ""
    assert deltas[0].end == ChoiceEnd(STOP, 1, stop_string="END")


def test_a_stop_string_before_min_tokens_is_passed_over(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, byte_ids(tokenizer, "xxxxx"), LENGTH, TextOptions(stops=("x",), min_tokens=4))
    assert text_of(deltas) == "xxx"
    assert deltas[-1].end == ChoiceEnd(STOP, 4, stop_string="x")


def test_the_end_token_is_no_text_even_with_special_tokens_shown(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(tokenizer, "hi"), EOS_ID]
    assert text_of(run(tokenizer, ids, STOP, TextOptions(skip_special_tokens=False))) == "hi"
    included = TextOptions(skip_special_tokens=False, include_stop=True)
    assert text_of(run(tokenizer, ids, STOP, included)) == "hi</s>"


def test_a_special_token_in_the_middle_is_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(tokenizer, "a"), EOS_ID, *byte_ids(tokenizer, "b")]
    assert text_of(run(tokenizer, ids, LENGTH, TextOptions())) == "ab"
    assert text_of(run(tokenizer, ids, LENGTH, TextOptions(skip_special_tokens=False))) == "a</s>b"


def test_the_clients_own_stop_token_is_reported(tokenizer: Tokenizer) -> None:
    [token_id] = byte_ids(tokenizer, "q")
    deltas = run(tokenizer, [token_id], STOP, TextOptions(stop_token_ids=frozenset({token_id})))
    assert deltas[-1].end == ChoiceEnd(STOP, 1, stop_token_id=token_id)


def test_without_text_tokens_pass_at_once(tokenizer: Tokenizer) -> None:
    first_byte = byte_ids(tokenizer, "é")[:1]
    deltas = run(tokenizer, first_byte, None, TextOptions(return_text=False))
    assert deltas == [ChoiceDelta(0, (SampledToken(first_byte[0]),), "")]


def test_an_aborted_choice_shows_what_was_held(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(0, tokenizer, (), TextOptions(stops=("END",)))
    for event in token_events(byte_ids(tokenizer, "EN")):
        choice.push(event)
    delta = choice.abort()
    assert delta is not None
    assert (delta.text, len(delta.tokens), delta.end) == ("EN", 2, ChoiceEnd(None, 2))
    assert choice.abort() is None


def test_a_gap_in_the_positions_is_a_bug(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(0, tokenizer, (), TextOptions())
    events = token_events(byte_ids(tokenizer, "abc"))
    choice.push(events[0])
    with pytest.raises(AssertionError):
        choice.push(events[2])
