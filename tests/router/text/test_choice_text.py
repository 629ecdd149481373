import pytest
from tokenizers import Tokenizer, decoders, models

from common.values.request import FinishReason, SampledToken
from router.text.choice_text import ChoiceDelta, ChoiceEnd, ChoiceText, Detokenizer, TextOptions
from router.text.token_text import TokenTexts
from tests.router.text.tokenizers_for_tests import EOS_ID, byte_ids, byte_tokenizer, piece_id, token_events

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def run(
    tokenizer: Tokenizer, token_ids: list[int], reason: FinishReason | None, options: TextOptions
) -> list[ChoiceDelta]:
    choice = ChoiceText(0, TokenTexts(tokenizer), (), options)
    deltas = [choice.push(event) for event in token_events(token_ids, reason)]
    return [delta for delta in deltas if delta is not None]


def text_of(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_characters_of_several_tokens_come_out_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(TokenTexts(tokenizer), (), skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(tokenizer, "한😀é")]
    assert pieces == ["", "", "한", "", "", "", "😀", "", "é"]


def test_a_character_begun_in_the_prompt_is_finished(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "ab한")
    detokenizer = Detokenizer(TokenTexts(tokenizer), ids[:3], skip_special_tokens=True)
    assert [detokenizer.push(token_id) for token_id in ids[3:]] == ["", "한"]


def test_half_a_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, byte_ids(tokenizer, "ok😀")[:-1], LENGTH, TextOptions())
    assert text_of(deltas) == "ok"
    assert sum(len(delta.tokens) for delta in deltas) == 5


def test_bytes_that_are_no_text_do_not_pile_up(tokenizer: Tokenizer) -> None:
    continuation = byte_ids(tokenizer, "é")[1]
    detokenizer = Detokenizer(TokenTexts(tokenizer), (), skip_special_tokens=True)
    pieces = [detokenizer.push(continuation) for _ in range(100)]
    assert 80 <= len("".join(pieces)) <= 100
    assert detokenizer.push(byte_ids(tokenizer, "x")[0]).endswith("x")


def test_a_leading_space_survives_behind_a_prompt() -> None:
    """SentencePiece drops the space at the start of a text; an answer is not the start."""
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1)])
    ids = byte_ids(tokenizer, "Hi you")
    with_prompt = Detokenizer(TokenTexts(tokenizer), ids[:2], skip_special_tokens=True)
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
    assert deltas == [ChoiceDelta(0, (SampledToken(first_byte[0]),), "", offsets=(0,))]


def test_an_aborted_choice_shows_what_was_held(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(0, TokenTexts(tokenizer), (), TextOptions(stops=("END",)))
    for event in token_events(byte_ids(tokenizer, "EN")):
        choice.push(event)
    delta = choice.abort()
    assert delta is not None
    assert (delta.text, len(delta.tokens), delta.end) == ("EN", 2, ChoiceEnd(None, 2))
    assert choice.abort() is None


def test_a_gap_in_the_positions_is_a_bug(tokenizer: Tokenizer) -> None:
    choice = ChoiceText(0, TokenTexts(tokenizer), (), TextOptions())
    events = token_events(byte_ids(tokenizer, "abc"))
    choice.push(events[0])
    with pytest.raises(AssertionError):
        choice.push(events[2])


def most_waiting(tokenizer: Tokenizer, token_ids: list[int], options: TextOptions) -> int:
    """How many tokens the client has not heard of, at the worst moment."""
    choice, waiting, worst = ChoiceText(0, TokenTexts(tokenizer), (), options), 0, 0
    for event in token_events(token_ids):
        delta = choice.push(event)
        waiting += 1 - (len(delta.tokens) if delta is not None else 0)
        worst = max(worst, waiting)
    return worst


def test_tokens_without_text_are_heard_of_at_a_bounded_distance(tokenizer: Tokenizer) -> None:
    """Alone, behind half a character, behind half a stop string; special ones, and ids beyond the tokenizer's."""
    half = byte_ids(tokenizer, "é")[:1]
    for silent in (EOS_ID, 5000):
        many = [silent] * 2000
        assert most_waiting(tokenizer, many, TextOptions()) == 0
        assert most_waiting(tokenizer, byte_ids(tokenizer, "EN") + many, TextOptions(stops=("END",))) <= 70
        assert most_waiting(tokenizer, half + many, TextOptions()) <= 70


def test_tokens_without_text_cost_what_others_do(tokenizer: Tokenizer) -> None:
    """What is decoded again and again does not grow."""
    detokenizer = Detokenizer(TokenTexts(tokenizer), (), skip_special_tokens=True)
    decoded: list[int] = []
    decode = detokenizer._decode
    detokenizer._decode = lambda ids: (decoded.append(len(ids)), decode(ids))[1]  # type: ignore[method-assign]
    for token_id in (EOS_ID, 5000, EOS_ID, 5001) * 500:
        detokenizer.push(token_id)
    assert max(decoded) <= 20
    assert detokenizer.push(byte_ids(tokenizer, "x")[0]) == "x"


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("stop", ["</s>", "a</s>", "</s>b", "a</s>b", "</s></s>"])
def test_a_stop_string_that_holds_a_special_token_matches_whether_or_not_it_is_shown(
    tokenizer: Tokenizer, stop: str, shown: bool
) -> None:
    ids = [*byte_ids(tokenizer, "xa"), EOS_ID, *([EOS_ID] if stop == "</s></s>" else []), *byte_ids(tokenizer, "bcd")]
    deltas = run(tokenizer, ids, None, TextOptions(stops=(stop,), skip_special_tokens=not shown))
    assert text_of(deltas) == ("x" if stop.startswith("a") else "xa")
    end = deltas[-1].end
    assert end is not None and end.stop_string == stop
    assert end.num_tokens == 2 + stop.count("</s>") + stop.count("b")


def test_a_stop_string_that_the_last_token_spells_is_reported(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, [*byte_ids(tokenizer, "hi"), EOS_ID], STOP, TextOptions(stops=("</s>",)))
    assert text_of(deltas) == "hi"
    assert deltas[-1].end == ChoiceEnd(STOP, 3, stop_string="</s>")


def test_special_tokens_that_spell_no_stop_string_stay_hidden(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(tokenizer, "a"), EOS_ID, *byte_ids(tokenizer, "</s"), EOS_ID, *byte_ids(tokenizer, "c")]
    assert text_of(run(tokenizer, ids, LENGTH, TextOptions(stops=("</s>!", "a</s></s>")))) == "a</sc"
    included = run(tokenizer, ids, None, TextOptions(stops=("a</s>",), include_stop=True))
    assert text_of(included) == "a</s>"


@pytest.mark.parametrize("text", ["\ufffd", "a\ufffd", "\ufffd\ufffdb", "é\ufffd", "\ufffd한"])
@pytest.mark.parametrize("reason", [LENGTH, STOP])
def test_a_replacement_character_that_the_model_wrote_is_text(
    tokenizer: Tokenizer, text: str, reason: FinishReason
) -> None:
    ids = byte_ids(tokenizer, text) + ([EOS_ID] if reason is STOP else [])
    assert text_of(run(tokenizer, ids, reason, TextOptions())) == text
    half = byte_ids(tokenizer, "😀")[:3]
    assert text_of(run(tokenizer, byte_ids(tokenizer, text) + half, LENGTH, TextOptions())) == text


def test_a_replacement_character_at_the_end_of_the_prompt_is_not_of_the_answer(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "x\ufffdy")
    detokenizer = Detokenizer(TokenTexts(tokenizer), ids[:-1], skip_special_tokens=True)
    assert detokenizer.push(ids[-1]) == "y"


def test_half_a_character_of_byte_tokens_is_lost_and_what_stands_before_it_is_not() -> None:
    """SentencePiece spells a character that it lacks as tokens of one byte, which it decodes together."""
    vocab = {"<unk>": 0, "\u2581hi": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    emoji = [2 + byte for byte in "😀".encode()]
    assert text_of(run(tokenizer, [1, *emoji], LENGTH, TextOptions())) == " hi😀"
    assert text_of(run(tokenizer, [1, *emoji[:3]], LENGTH, TextOptions())) == " hi"
    assert text_of(run(tokenizer, [1, *[2 + byte for byte in "\ufffd".encode()]], LENGTH, TextOptions())) == " hi\ufffd"


@pytest.mark.parametrize("stops", [(), ("ND",), ("zzz",), ("</s>k",), ("k😀",)])
@pytest.mark.parametrize("skip", [True, False])
def test_offsets_point_to_where_the_text_of_a_token_begins(
    tokenizer: Tokenizer, stops: tuple[str, ...], skip: bool
) -> None:
    ids = [*byte_ids(tokenizer, "a한"), EOS_ID, *byte_ids(tokenizer, "b\ufffd"), piece_id(tokenizer, "END"),
           *byte_ids(tokenizer, "k😀"), *byte_ids(tokenizer, "é")[:1]]  # fmt: skip
    deltas = run(tokenizer, ids, LENGTH, TextOptions(stops=stops, skip_special_tokens=skip))
    text = text_of(deltas)
    offsets = [offset for delta in deltas for offset in delta.offsets]
    tokens = [token.token_id for delta in deltas for token in delta.tokens]
    assert len(offsets) == len(tokens)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    spelled = dict(zip(tokens, offsets, strict=True))
    assert text[spelled[byte_ids(tokenizer, "b")[0]]] == "b"
    assert text[spelled[piece_id(tokenizer, "END")] :].startswith("E")
    if not {"ND", "k😀"} & set(stops):
        assert text[spelled[byte_ids(tokenizer, "k")[0]]] == "k"
