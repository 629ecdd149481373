"""The smoothed speed of a worker."""

import pytest

from common.engine.scheduling.step_rate import StepRate


def test_rate_is_unknown_before_the_first_step() -> None:
    rate = StepRate()
    assert (rate.step_s, rate.prefill_tokens_per_s) == (0.0, 0.0)


def test_rate_weighs_steps_by_their_time_and_follows_a_change() -> None:
    rate = StepRate()
    for _ in range(50):
        rate.add(100, 0, 0.1)
    assert rate.prefill_tokens_per_s == pytest.approx(1000.0)
    assert rate.step_s == pytest.approx(0.1)
    for _ in range(50):
        rate.add(100, 0, 0.2)
    assert rate.prefill_tokens_per_s == pytest.approx(500.0, rel=0.01)
    assert rate.step_s == pytest.approx(0.2, rel=0.01)


def test_steps_without_prefill_do_not_lower_the_prefill_rate() -> None:
    rate = StepRate()
    rate.add(64, 0, 0.1)
    rate.add(0, 0, 5.0)
    assert rate.prefill_tokens_per_s == pytest.approx(640.0)


def test_time_of_what_decodes_beside_a_prompt_is_not_the_prompts() -> None:
    rate = StepRate()
    rate.add(0, 4, 0.1)
    assert (rate.decode_s, rate.prefill_tokens_per_s) == (0.1, 0.0)
    rate.add(100, 4, 0.3)
    assert rate.prefill_tokens_per_s == pytest.approx(500.0)
