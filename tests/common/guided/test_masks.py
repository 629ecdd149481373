"""Masks: derived from grammar and output alone, whatever was asked before."""

import random

import numpy as np
import pytest

from common.guided import grammar
from common.guided.grammar import GrammarError
from common.guided.masks import MAX_MATCHERS, GrammarFailed
from tests.common.guided.tokens import EOS_ID, GUIDED, TOKENIZER, VOCAB_SIZE, accepts, new_masks, random_output
from tests.router.text.tokenizers_for_tests import byte_ids

OBJECT = grammar.of_json_object()
CHOICE = grammar.of_choice(["yes", "no", "yes and no"])


def letters(mask: np.ndarray) -> str:  # type: ignore[type-arg]
    return "".join(sorted(TOKENIZER.decode([int(idx)]) for idx in np.flatnonzero(mask) if idx != EOS_ID))


def test_a_mask_has_every_token_that_fits_and_no_other() -> None:
    masks = new_masks()
    assert letters(masks.allowed(CHOICE, ())) == "ny"
    yes = tuple(byte_ids(TOKENIZER, "yes"))
    after = masks.allowed(CHOICE, yes)
    assert (letters(after), bool(after[EOS_ID])) == (" ", True)
    assert masks.allowed(CHOICE, ()).shape == (VOCAB_SIZE,)


def test_masks_do_not_depend_on_what_was_asked_before() -> None:
    """Each output of 40 walks, in any order and from another worker's view, has the mask that a fresh one gives."""
    rng, walked = random.Random(1), new_masks()
    texts = [text for _ in range(40) if (text := random_output(walked, OBJECT, rng))]
    prefixes = [tuple(byte_ids(TOKENIZER, text))[:at] for text in texts for at in (0, 1, len(text) // 2)]
    rng.shuffle(prefixes)
    for prefix in prefixes:
        assert np.array_equal(walked.allowed(OBJECT, prefix), new_masks().allowed(OBJECT, prefix))


def test_forks_of_one_output_go_on_apart() -> None:
    masks = new_masks()
    begun = tuple(byte_ids(TOKENIZER, "yes"))
    space, (n, y) = byte_ids(TOKENIZER, " ")[0], byte_ids(TOKENIZER, "ny")
    assert letters(masks.allowed(CHOICE, (*begun, space))) == "a"
    assert letters(masks.allowed(CHOICE, (n,))) == "o"
    assert letters(masks.allowed(CHOICE, (y,))) == "e"
    assert letters(masks.allowed(CHOICE, begun)) == " "


def test_an_output_that_cannot_be_has_a_reason_and_no_mask() -> None:
    with pytest.raises(GrammarFailed):
        new_masks().allowed(CHOICE, tuple(byte_ids(TOKENIZER, "maybe")))


def test_after_the_end_only_the_end_fits() -> None:
    mask = new_masks().allowed(CHOICE, tuple(byte_ids(TOKENIZER, "no")))
    assert np.flatnonzero(mask).tolist() == [EOS_ID]


def test_matchers_are_bounded() -> None:
    masks = new_masks()
    digits = grammar.of_regex("[0-9]{6}")
    for number in range(MAX_MATCHERS + 50):
        masks.allowed(digits, tuple(byte_ids(TOKENIZER, f"{number:06}"[:5] + str(number % 10)))[: number % 6])
    assert len(masks._matchers) <= MAX_MATCHERS


@pytest.mark.parametrize(
    ("found", "good", "bad"),
    [
        (grammar.of_regex("[a-c]+x?"), "abcx", "abd"),
        (grammar.of_choice(['quo"te', "größe"]), "größe", "groesse"),
        (grammar.of_grammar('start: "a" b+\nb: "b" | "c"'), "abcb", "a"),
        (grammar.of_grammar('root ::= "x" ("y" | "z")*'), "xyzz", "y"),
        (grammar.of_json_object(), '{"a": [1, null]}', "[1]"),
        (
            grammar.of_structural_tags(
                [{"trigger": "<f", "begin": "<f=a>", "schema": {"type": "integer", "maximum": 9}, "end": "</f>"}]
            ),
            "text <f=a>7</f> more", "text <f=b>7",
        ),
    ],
)  # fmt: skip
def test_each_kind_of_constraint(found: str, good: str, bad: str) -> None:
    grammar.check(found, GUIDED)
    masks = new_masks()
    assert accepts(masks, found, good)
    assert not accepts(masks, found, bad)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (grammar.of_regex, "["),
        (grammar.of_regex, "(?=x)y"),
        (grammar.of_choice, []),
        (grammar.of_choice, [""]),
        (grammar.of_choice, ["x"] * 2000),
        (grammar.of_grammar, "no grammar ("),
        (grammar.of_grammar, "start: missing"),
        (grammar.of_regex, "a" * (300 << 10)),
        (grammar.of_structural_tags, []),
        (grammar.of_structural_tags, [{"begin": "<f>"}]),
    ],
)  # fmt: skip
def test_a_constraint_that_is_wrong_is_refused(make: object, value: object) -> None:
    with pytest.raises(GrammarError):
        grammar.check(make(value), GUIDED)  # type: ignore[operator]


def test_an_error_does_not_repeat_the_grammar() -> None:
    canary = "CANARY" * 50
    with pytest.raises(GrammarError) as caught:
        grammar.check(grammar.of_regex(f"{canary}["), GUIDED)
    assert canary not in str(caught.value)


@pytest.mark.parametrize("seed", range(10))
def test_masks_along_drafts_are_those_of_each_output_alone(seed: int) -> None:
    """The drafts are right up to somewhere, then one does not fit; the next step goes on behind some of them."""
    rng, masks = random.Random(seed), new_masks()
    text = random_output(new_masks(), OBJECT, rng) or "{}"
    tokens = tuple(byte_ids(TOKENIZER, text))
    at = 0
    while at < len(tokens):
        num_right = rng.randint(0, 5)
        drafts = (*tokens[at : at + num_right], *byte_ids(TOKENIZER, "]]"))
        along = masks.allowed_along(OBJECT, tokens[:at], drafts)
        assert len(along) >= 1 + min(num_right, len(tokens) - at)
        for num, mask in enumerate(along):
            assert np.array_equal(mask, new_masks().allowed(OBJECT, (*tokens[:at], *drafts[:num])))
        at += 1 + rng.randint(0, num_right)


def test_drafts_beyond_the_end_leave_the_matcher_usable() -> None:
    masks, no = new_masks(), tuple(byte_ids(TOKENIZER, "no"))
    along = masks.allowed_along(CHOICE, no, (EOS_ID, *no))
    assert 1 <= len(along) <= 2
    assert np.flatnonzero(masks.allowed(CHOICE, no)).tolist() == [EOS_ID]


def test_a_run_of_drafts_needs_no_new_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, tokens = new_masks(), tuple(byte_ids(TOKENIZER, "yes and no"))
    masks.allowed_along(CHOICE, (), tokens[:4])
    monkeypatch.setattr(masks, "_new_matcher", None)
    for seen in (4, 5, 9):
        masks.allowed_along(CHOICE, tokens[:seen], tokens[seen : seen + 1])
