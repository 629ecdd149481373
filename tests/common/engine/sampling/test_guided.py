"""Sampling under a grammar: only what fits is drawn, and rows beside it draw as they would alone."""

import dataclasses

import pytest
import torch

from common.engine.contract.plan import SampleSpec
from common.engine.sampling import SampleError, sample
from common.engine.sampling.guided import GuidedRows
from common.guided import grammar
from common.guided.masks import GrammarFailed, Masks
from common.values.request import SampledToken, SamplingParams
from tests.common.guided.tokens import EOS_ID, TOKENIZER, VOCAB_SIZE, new_masks
from tests.router.text.tokenizers_for_tests import byte_ids

DIGITS = grammar.of_regex("[0-9]{3}")
PLAIN = SamplingParams(seed=5, max_tokens=9)


def spec(text: str = "", *, position: int = 0, **params: object) -> SampleSpec:
    sampling = dataclasses.replace(PLAIN, grammar=DIGITS, stop_token_ids=(EOS_ID,), **params)  # type: ignore[arg-type]
    output = tuple(byte_ids(TOKENIZER, text))
    banned = sampling.banned_token_ids(output, len(output))
    return SampleSpec(0, position + len(output), sampling, 2, (7, 7, *output), banned)


def guided(logits: torch.Tensor, specs: list[SampleSpec]) -> list[SampledToken | SampleError]:
    return sample(logits, specs, None, GuidedRows(new_masks).start(specs)())


def logits(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_only_tokens_that_fit_are_drawn(temperature: float) -> None:
    specs = [spec("12", position=at, temperature=temperature) for at in range(50)]
    drawn = guided(logits(50), specs)
    texts = {TOKENIZER.decode([token.token_id]) for token in drawn if isinstance(token, SampledToken)}
    assert texts <= set("0123456789")
    assert len(texts) > 5


def test_a_draw_is_the_one_among_the_tokens_that_fit() -> None:
    """As if all others were forbidden one by one."""
    (with_grammar,) = guided(logits(1), [spec("1")])
    digits = tuple(byte_ids(TOKENIZER, "0123456789"))
    allowed = dataclasses.replace(PLAIN, allowed_token_ids=digits)
    (by_list,) = sample(logits(1), [SampleSpec(0, 1, allowed)])
    assert with_grammar == by_list


def test_rows_without_a_grammar_draw_as_they_do_alone() -> None:
    plain = [SampleSpec(0, at, PLAIN) for at in range(3)]
    mixed = guided(logits(4), [*plain[:2], spec("1"), plain[2]])
    alone = sample(logits(4)[[0, 1, 3]], plain)
    assert [mixed[0], mixed[1], mixed[3]] == alone


def test_at_the_end_of_a_grammar_the_end_is_drawn_even_before_min_tokens() -> None:
    (ended,) = guided(logits(1), [spec("123", min_tokens=8)])
    assert isinstance(ended, SampledToken)
    assert ended.token_id == EOS_ID


def test_penalties_and_bias_count_among_what_fits() -> None:
    nine = byte_ids(TOKENIZER, "9")[0]
    (token,) = guided(logits(1), [spec("1", temperature=0.0, logit_bias=((nine, 100.0), (3, 100.0)))])
    assert isinstance(token, SampledToken)
    assert token.token_id == nine


def test_an_output_that_left_its_grammar_is_an_error_of_its_row_alone() -> None:
    found = guided(logits(2), [spec("1x"), spec("1")])
    assert isinstance(found[0], SampleError)
    assert "guided decoding" in found[0].reason
    assert isinstance(found[1], SampledToken)


def test_a_model_without_a_tokenizer_says_so_for_guided_rows_only() -> None:
    def no_masks() -> Masks:
        raise GrammarFailed("no tokenizer")

    specs = [spec("1"), SampleSpec(0, 0, PLAIN)]
    found = sample(logits(2), specs, None, GuidedRows(no_masks).start(specs)())
    assert found[0] == SampleError("guided decoding: no tokenizer")
    assert isinstance(found[1], SampledToken)


def test_logprobs_are_of_the_raw_logits() -> None:
    row = logits(1)
    (token,) = guided(row, [spec("1", num_logprobs=0)])
    assert isinstance(token, SampledToken)
    assert token.logprob == pytest.approx(float(row.log_softmax(-1)[0, token.token_id]), abs=1e-5)


def test_rows_of_drafts_draw_as_each_would_alone() -> None:
    """An output, a draft that fits, one that does not, and what is behind it: the last has no token."""
    params = spec("1").params
    specs = [dataclasses.replace(spec(text), params=params) for text in ("1", "12", "12x", "12x3")]
    beside = [SampleSpec(0, 0, PLAIN), dataclasses.replace(spec("3"), choice_idx=1)]
    found = guided(logits(6), [beside[0], *specs, beside[1]])
    alone = [guided(logits(6)[[row]], [one])[0] for row, one in enumerate([beside[0], *specs, beside[1]])]
    assert found[:3] + found[5:] == alone[:3] + alone[5:]
    assert all(isinstance(row, SampleError) for row in found[3:5])
