"""The judges judge: a wrong answer, an error outside its window, and growth are seen."""

import time
from dataclasses import replace

from tests.chaos.campaign import lost_with
from tests.chaos.footprint import Footprint, growth, mean
from tests.chaos.ledger import Api, Entry, Outcome, Question, in_words, problems
from tests.chaos.questions import mixed_cases
from tests.chaos.soak import Fault, Soak
from tests.cluster.load import Case
from tests.tiny_model import tiny_tokenizer

ANSWER = (70, 71, 72)
QUESTION = Question(Case((3, 4, 5), seed=1, max_tokens=3), ANSWER, str(tiny_tokenizer().decode(list(ANSWER))))


def entry(started_s: float = 0.0, api: Api = Api.HTTP_STREAM) -> Entry:
    return Entry("r", QUESTION, api, started_s)


def text_of(token_ids: list[int]) -> str:
    return str(tiny_tokenizer().decode(token_ids))


def test_exactly_the_reference_is_right() -> None:
    asked = entry()
    asked.add([70, 71], text_of([70, 71]))
    asked.add([72], text_of([72]))
    asked.end(Outcome.RIGHT)
    assert asked.outcome is Outcome.RIGHT
    assert problems([asked]) == []


def test_another_token_one_too_few_and_another_text_are_wrong() -> None:
    for tokens, text in (([70, 71, 73], text_of([70, 71, 73])), ([70, 71], text_of([70, 71])), ([70, 71, 72], "other")):
        asked = entry()
        asked.add(tokens, text)
        asked.end(Outcome.RIGHT)
        assert asked.outcome is Outcome.WRONG
        assert len(problems([asked])) == 1


def test_wrong_tokens_before_an_error_are_wrong_and_right_ones_an_error() -> None:
    bad, good = entry(), entry()
    bad.add([71], text_of([71]))
    good.add([70], text_of([70]))
    bad.end(Outcome.ERROR, "503")
    good.end(Outcome.ERROR, "503")
    assert (bad.outcome, good.outcome) == (Outcome.WRONG, Outcome.ERROR)


def test_an_answer_of_other_weights_is_right_only_as_a_whole() -> None:
    other = Question(QUESTION.case, (80, 81, 82), text_of([80, 81, 82]))
    for tokens, outcome in (
        ([80, 81, 82], Outcome.RIGHT),
        ([70, 81, 82], Outcome.WRONG),
        ([70, 71, 72], Outcome.RIGHT),
    ):
        asked = Entry("r", replace(QUESTION, others=(other,)), Api.HTTP_STREAM, 0.0)
        asked.add(tokens, text_of(tokens))
        asked.end(Outcome.RIGHT)
        assert asked.outcome is outcome
    assert asked.answer is asked.question


def test_pauses_are_told_by_median_95th_percentile_and_most() -> None:
    assert in_words([]) == ""
    text = in_words([0.01 * number for number in range(1, 101)])
    assert "0.51 s in the median, 0.95 s in the 95th percentile, 1.00 s at most" in text


def test_a_wait_counts_from_the_start_and_only_if_it_ended_after_the_moment() -> None:
    asked = entry(started_s=10.0)
    asked.tokens, asked.token_times_s = [70, 71, 72], [11.0, 11.5, 14.0]
    assert asked.longest_wait_s() == 2.5
    assert asked.longest_wait_s(since_s=14.5) == 0.0
    assert asked.gap_after(11.25) == 0.25
    assert asked.gap_after(14.0) is None
    assert asked.was_running(10.5)
    assert not asked.was_running(9.5)


def test_questions_are_the_same_for_the_same_seed_and_share_beginnings() -> None:
    cases = mixed_cases(16, seed=4)
    assert cases == mixed_cases(16, seed=4)
    beginnings = [case.token_ids[:50] for case in cases if len(case.token_ids) > 100]
    assert len(set(beginnings)) < len(beginnings)


def test_an_error_is_forgiven_only_while_its_fault_lasts() -> None:
    now_s = time.monotonic()
    fault = Fault("router-killed", "gone", now_s - 10, now_s + 10, frozenset({"cut"}))
    samples = [Footprint(5, 100, 100, 500.0)]
    gone = entry(now_s)
    gone.end(Outcome.LEFT)
    inside, outside = entry(now_s - 1), entry(now_s - 100)
    right = entry(now_s)
    inside.end(Outcome.CUT)
    outside.end(Outcome.CUT)
    outside.ended_s = now_s - 90
    right.add([70, 71, 72], text_of([70, 71, 72]))
    right.end(Outcome.RIGHT)
    forgiven = Soak(0, 60, faults=[fault], before=samples, after=samples, entries=[inside, right, gone])
    assert forgiven.problems() == []
    blamed = Soak(0, 60, faults=[fault], before=samples, after=samples, entries=[outside, right, gone])
    assert len(blamed.problems()) == 1


def test_a_soak_in_which_too_few_leave_has_failed() -> None:
    samples = [Footprint(5, 100, 100, 500.0)]
    entries = [entry(api=api) for api in (Api.HTTP_STREAM,) * 4]
    for idx, asked in enumerate(entries):
        if idx:
            asked.add([70, 71, 72], text_of([70, 71, 72]))
        asked.end(Outcome.RIGHT if idx else Outcome.LEFT)
    assert Soak(0, 60, before=samples, after=samples, entries=entries).problems() == []
    (problem,) = Soak(0, 60, before=samples, after=samples, entries=[*entries, entries[-1]]).problems()
    assert problem == "only 20% of the clients left before their answer was complete"


def test_growth_beyond_tolerance_is_told_and_within_is_not() -> None:
    before = Footprint(5, 300, 200, 1000.0)
    assert growth(before, Footprint(5, 320, 210, 1100.0)) == []
    assert growth(before, Footprint(5, 400, 200, 1000.0)) == ["descriptors grew from 300 to 400"]
    assert growth(before, Footprint(4, 200, 100, 1000.0)) == ["5 processes before, 4 after"]
    assert mean([before, Footprint(5, 900, 200, 1000.0), before]).descriptors == 300


def test_a_pause_is_counted_for_the_death_that_caused_it() -> None:
    def attempt(decode: str) -> dict[str, str]:
        return {"decode_worker": decode}

    def tried(worker_id: str) -> dict[str, str]:
        return {"role": "prefill", "chosen": worker_id}

    replayed = {"attempts": [attempt("decode-0#a"), attempt("decode-1#b")], "decisions": []}
    assert lost_with(replayed, "decode-0#a")
    assert not lost_with(replayed, "decode-0#c")
    assert not lost_with(replayed, "decode-1#b")
    retried = {"attempts": [attempt("decode-0#a")], "decisions": [tried("prefill-1"), tried("prefill-0")]}
    assert lost_with(retried, "prefill-1#x")
    assert not lost_with(retried, "prefill-0#x")
    assert not lost_with({}, "decode-0#a")
