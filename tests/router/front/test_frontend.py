"""What both APIs share: the way through the front end, the requests in flight, several prompts in one request."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from common.values.errors import InvalidRequest, NoReadyPair, PdserveError, RequestCancelled
from common.values.ids import RequestId
from router.core.generation import Failed, GenerationRequest, Tokens
from router.front.frontend import Frontend
from router.front.in_flight import InFlight
from router.front.merge import merged
from router.front.output import Deltas, Summary
from router.request import limits
from router.request.spec import ChatPrompt, RequestSpec, Stated, TextPrompt
from router.request.validation import Validator
from router.tenants.tenants import Tenant
from router.text.tokenizer import PromptTokenizer
from tests.router.front.http_rig import MODEL, build_frontend, ids, in_flight
from tests.router.front.scripted_service import Pause, Script, ScriptedService, accepted, always, tokens
from tests.router.text.tokenizers_for_tests import byte_tokenizer

SPEC = RequestSpec(TextPrompt("x"))


class CountingMetrics:
    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.counts[(name, *labels.values())] += 1

    def set(self, name: str, value: float, **labels: str) -> None:
        raise AssertionError

    def observe(self, name: str, value: float, **labels: str) -> None:
        raise AssertionError


async def numbers(*values: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
    for value in values:
        yield value
        await asyncio.sleep(0)
    if error is not None:
        raise error


async def test_refusals_are_counted_and_the_services_failures_are_not() -> None:
    metrics = CountingMetrics()
    tokenizer = PromptTokenizer(byte_tokenizer())
    validator = Validator(MODEL, 10.0, random.Random(1), ids)
    frontend = Frontend(always([1]), tokenizer, MODEL, validator, metrics)
    frontend.note_refusal(InvalidRequest("bad", param="n"))
    frontend.note_refusal(NoReadyPair("none"))
    assert metrics.counts == {("pdserve_requests", "refused", "invalid_value"): 1}


async def test_what_takes_long_is_done_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_INLINE_TOKENIZE_LENGTH", 10)
    frontend = build_frontend(always([1]))
    off_loop: list[bool] = []

    def noted(name: str) -> None:
        call = getattr(frontend.tokenizer, name)

        def note(*args: object, **kwargs: object) -> object:
            off_loop.append(threading.current_thread() is not threading.main_thread())
            return call(*args, **kwargs)

        monkeypatch.setattr(frontend.tokenizer, name, note)

    for name in ("encode", "encode_chat", "decode"):
        noted(name)
    text, short = "a longer text than ten", "short"
    user = {"role": "user", "content": "x"}
    assert list(await frontend.tokenize(TextPrompt(text)))[1:] == ids(text)
    assert ids(text)[0] in await frontend.tokenize(ChatPrompt(({"role": "user", "content": text},)))
    with pytest.raises(InvalidRequest):  # the template reads no such argument
        await frontend.tokenize(ChatPrompt((user,), template_kwargs={"tone": text}))
    assert await frontend.detokenize(ids(text), "tokens") == text
    assert off_loop == [True] * 4
    assert await frontend.token_strings(ids(text)) == list(text)
    assert list(await frontend.tokenize(TextPrompt(short)))[1:] == ids(short)
    await frontend.tokenize(ChatPrompt((user,)))
    assert await frontend.detokenize(ids(short), "tokens") == short
    assert off_loop[4:] == [False] * 3


async def test_a_stop_string_stops_only_its_choice() -> None:
    """Choice 0 meets the stop string, choice 1 runs to its length; the service stops choice 0 once."""

    def script(request: GenerationRequest) -> Script:
        steps = tokens([ids("xSTOPyyy"), ids("abcdefgh")])
        finished = always([1]).script(request)[-1]
        return [accepted(request), *steps, finished]

    service = ScriptedService(script)
    frontend = build_frontend(service)
    spec = RequestSpec(TextPrompt("x"), Stated(n=2, stop="STOP"))
    request = await frontend.admit(spec, RequestId("r"), Tenant(""))
    updates = [update async for _, update in frontend.answers.run(request)]
    texts = {0: "", 1: ""}
    for update in updates:
        if isinstance(update, Deltas):
            for delta in update.deltas:
                texts[delta.choice_idx] += delta.text
    assert texts == {0: "x", 1: "abcdefgh"}
    assert service.stopped == [("r", 0)]
    assert isinstance(updates[-1], Summary) and updates[-1].num_completion_tokens == 5 + 8


async def test_a_stop_string_inside_accepted_drafts_ends_the_choice_there() -> None:
    """One step of a worker gave several tokens, and what comes behind the stop string among them is not told."""

    def script(request: GenerationRequest) -> Script:
        steps = [event for step in tokens([ids("abxSTOPyyy")]) for event in step.tokens]
        return [accepted(request), Tokens(tuple(steps[:2])), Tokens(tuple(steps[2:9])), Tokens(tuple(steps[9:])),
                always([1]).script(request)[-1]]  # fmt: skip

    service = ScriptedService(script)
    frontend = build_frontend(service)
    request = await frontend.admit(RequestSpec(TextPrompt("x"), Stated(stop="STOP")), RequestId("r"), Tenant(""))
    updates = [update async for _, update in frontend.answers.run(request)]
    deltas = [delta for update in updates if isinstance(update, Deltas) for delta in update.deltas]
    assert "".join(delta.text for delta in deltas) == "abx"
    assert [delta.end.stop_string for delta in deltas if delta.end is not None] == ["STOP"]
    assert service.stopped == [("r", 0)]
    assert isinstance(updates[-1], Summary) and updates[-1].num_completion_tokens == len("abxSTOP")


async def test_an_abort_of_a_service_that_says_so_is_an_end_too() -> None:
    """A service may end a cancelled request with a failure instead of silence."""

    def script(request: GenerationRequest) -> Script:
        frontend.in_flight.abort(request.request_id, "")
        return [Failed(RequestCancelled("the request was cancelled"))]

    class Answering(ScriptedService):
        def cancel(self, request_id: RequestId) -> None:
            self.cancelled.append(request_id)

    frontend = build_frontend(Answering(script))
    request = await frontend.admit(SPEC, RequestId("r"), Tenant(""))
    updates = [update async for _, update in frontend.answers.run(request)]
    assert isinstance(updates[-1], Summary)
    assert isinstance(updates[0], Deltas) and updates[0].deltas[0].end is not None
    assert updates[0].deltas[0].end.reason is None


async def test_what_is_left_after_the_grace_fails_and_nothing_new_enters() -> None:
    service = ScriptedService(lambda _: [Pause()])
    frontend = build_frontend(service)
    request = await frontend.admit(SPEC, RequestId("r"), Tenant(""))

    async def follow() -> None:
        async for _ in frontend.answers.run(request):
            pass

    running = asyncio.ensure_future(follow())
    await in_flight(frontend, 1)
    frontend.in_flight.close()
    with pytest.raises(NoReadyPair):
        async for _ in frontend.answers.run(await frontend.admit(SPEC, RequestId("late"), Tenant(""))):
            pass
    await frontend.in_flight.drain(0.0)
    with pytest.raises(NoReadyPair, match="shutting down"):
        await running
    assert await frontend.in_flight.wait_until_empty(1.0)
    assert not frontend.readiness().is_ready


async def test_an_unknown_request_cannot_be_aborted() -> None:
    assert not InFlight(always([1])).abort(RequestId("nobody"), "")


async def test_merged_streams_give_every_item_in_each_streams_order() -> None:
    items = [item async for item in merged([numbers(1, 2, 3), numbers(), numbers(10, 20)])]
    assert sorted(items) == [1, 2, 3, 10, 20]
    assert [item for item in items if item < 10] == [1, 2, 3]


async def test_one_error_ends_all_merged_streams() -> None:
    closed: list[int] = []

    async def endless(idx: int) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield idx
                await asyncio.sleep(0)
        finally:
            closed.append(idx)

    with pytest.raises(PdserveError, match="broken"):
        async for _ in merged([endless(0), numbers(1, error=PdserveError("broken")), endless(2)]):
            pass
    assert sorted(closed) == [0, 2]


async def test_a_merged_stream_that_is_left_closes_its_sources() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            closed.set()

    stream = merged([endless(), endless()])
    assert await anext(stream) == 1
    await stream.aclose()
    assert closed.is_set()
