"""The service over real gRPC on loopback, against the workers' own servicer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.cluster.memory import InMemoryIndex
from common.cluster.protocol import Registration
from common.values.config import ModelConfig, RouterConfig
from common.values.errors import InvalidRequest, NoReadyPair, RequestCancelled
from common.values.hashing import block_hashes, hash_root
from common.values.ids import RequestId, WorkerRef
from common.values.messages import Cancel, Drain, Prefill, Reserve, Role, WorkerState
from common.values.request import NO_ADAPTER, Adapter
from router.core.generation import Accepted, Failed, Finished, GenerationEvent, GenerationRequest, Tokens
from router.front.service_protocol import GenerationService, RankView
from router.service import RouterService
from tests.router.core.kit import BLOCK_SIZE, FINGERPRINT, request
from tests.router.fake_workers import expected_output
from tests.router.grpc_worker import GrpcWorker, grpc_workers, idle_stats


@asynccontextmanager
async def running_service(index: InMemoryIndex, **config: object) -> AsyncIterator[RouterService]:
    """The fake workers report nothing by themselves, so their silence counts for little unless a test is about it."""
    config = {"worker_silence_s": 600.0, **config}
    service = RouterService(RouterConfig(model=ModelConfig(path="tiny"), **config), index, index)  # type: ignore[arg-type]
    await service.start()
    try:
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def cluster(*worker_ids: str, **config: object) -> AsyncIterator[tuple[RouterService, dict[str, GrpcWorker]]]:
    """A service that has found its workers."""
    index = InMemoryIndex()
    async with grpc_workers(index, *worker_ids) as workers, running_service(index, **config) as service:
        await until(lambda: len(service.state().workers) == len(worker_ids))
        yield service, workers


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - looks at states that have no event
            await asyncio.sleep(0.005)


async def run(service: GenerationService, spec: GenerationRequest) -> list[GenerationEvent]:
    async with asyncio.timeout(60):
        return [event async for event in service.submit(spec)]


def output(events: list[GenerationEvent], choice: int = 0) -> list[int]:
    tokens = [t for event in events if isinstance(event, Tokens) for t in event.tokens if t.choice_idx == choice]
    assert [token.position for token in tokens] == list(range(len(tokens)))
    return [token.token.token_id for token in tokens]


async def test_a_request_runs_end_to_end_over_grpc() -> None:
    async with cluster("p0", "d0") as (service, workers):
        spec = request(max_tokens=5, num_choices=2)
        events = await run(service, spec)
        assert isinstance(events[0], Accepted)
        assert isinstance(events[-1], Finished)
        for choice in range(2):
            assert output(events, choice) == expected_output(spec, choice)
        await workers["p0"].until(lambda: bool(workers["p0"].received))
        prefill = workers["p0"].received[0]
        assert isinstance(prefill, Prefill)
        assert prefill.decode_worker == workers["d0"].info.ref


async def test_many_requests_run_at_once() -> None:
    async with cluster("p0", "p1", "d0", "d1") as (service, _):
        specs = [request(f"r{idx}", num_tokens=20 + idx, max_tokens=8) for idx in range(50)]
        for spec, events in zip(specs, await asyncio.gather(*(run(service, spec) for spec in specs)), strict=True):
            assert output(events) == expected_output(spec, 0)


async def test_killed_decode_worker_is_replaced_without_gap_or_repeat() -> None:
    async with cluster("p0", "d0", "d1") as (service, workers):
        for worker in (workers["d0"], workers["d1"]):
            worker.is_paused = True
        spec = request(max_tokens=6)
        reading = asyncio.create_task(run(service, spec))
        await until(lambda: bool(workers["d0"].received or workers["d1"].received))
        first, second = sorted((workers["d0"], workers["d1"]), key=lambda worker: not worker.received)
        second.is_paused = False
        await first.kill()
        events = await reading
        assert output(events) == expected_output(spec, 0)
        assert isinstance(events[-1], Finished)
        assert events[-1].timings.num_retries == 1


async def test_cancel_reaches_the_worker_and_ends_the_stream() -> None:
    async with cluster("p0", "d0") as (service, workers):
        workers["d0"].is_paused = True
        spec = request()
        reading = asyncio.create_task(run(service, spec))
        await workers["d0"].until(lambda: bool(workers["d0"].received))
        service.cancel(spec.request_id)
        service.cancel(spec.request_id)
        last = (await reading)[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, RequestCancelled)
        await workers["d0"].until(lambda: len(workers["d0"].received) == 2)
        kinds = [type(message) for message in workers["d0"].received]
        assert kinds == [Reserve, Cancel]


async def test_without_workers_a_request_fails_at_once() -> None:
    async with running_service(InMemoryIndex()) as service:
        last = (await run(service, request()))[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, NoReadyPair)
        assert not service.readiness().is_ready
        assert service.readiness().reasons == ("no prefill worker is ready", "no decode worker is ready")


async def test_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    async with cluster("p0", "d0") as (service, workers):
        workers["d0"].is_paused = True
        spec = request(max_tokens=3)
        reading = asyncio.create_task(run(service, spec))
        await workers["d0"].until(lambda: bool(workers["d0"].received))
        second = (await run(service, spec))[-1]
        assert isinstance(second, Failed)
        assert isinstance(second.error, InvalidRequest)
        workers["d0"].answer(workers["d0"].received[0])
        assert isinstance((await reading)[-1], Finished)


async def test_the_index_steers_and_the_salt_separates() -> None:
    """The hashes that a worker publishes are those that the router asks for."""
    index = InMemoryIndex()
    async with grpc_workers(index, "p0", "p1", "d0") as workers, running_service(index) as service:
        await until(lambda: len(service.state().workers) == 3)
        spec = request(num_tokens=64, cache_salt=b"tenant")
        root = hash_root(dict(FINGERPRINT.fields), BLOCK_SIZE, b"tenant")
        index.writer(workers["p1"].info.ref).publish(block_hashes(spec.token_ids, BLOCK_SIZE, root), ())
        accepted = (await run(service, spec))[0]
        assert isinstance(accepted, Accepted)
        assert (accepted.prefill_worker_id, accepted.num_cached_tokens) == ("p1", 63)
        other = (await run(service, request("other", num_tokens=64)))[0]
        assert isinstance(other, Accepted)
        assert other.num_cached_tokens == 0


async def test_the_index_tells_adapters_apart() -> None:
    """Of the same tokens what was computed with the base weights is no adapter's, nor the other way round."""
    index, adapter = InMemoryIndex(), Adapter("d" * 64, "/adapter")
    async with grpc_workers(index, "p0", "p1", "d0") as workers, running_service(index) as service:
        await until(lambda: len(service.state().workers) == 3)
        spec = request(num_tokens=64)
        for worker_id, digest in (("p0", ""), ("p1", adapter.digest)):
            root = hash_root(dict(FINGERPRINT.fields), BLOCK_SIZE, b"", digest)
            hashes = block_hashes(spec.token_ids, BLOCK_SIZE, root)
            index.writer(workers[worker_id].info.ref).publish(hashes, ())
        for number, (worker_id, wanted) in enumerate((("p0", NO_ADAPTER), ("p1", adapter))):
            accepted = (await run(service, request(str(number), num_tokens=64, adapter=wanted)))[0]
            assert isinstance(accepted, Accepted)
            assert (accepted.prefill_worker_id, accepted.num_cached_tokens) == (worker_id, 63)
        other = (await run(service, request("other", num_tokens=64, adapter=Adapter("e" * 64, "/other"))))[0]
        assert isinstance(other, Accepted)
        assert other.num_cached_tokens == 0


async def test_state_shows_what_workers_report() -> None:
    async with cluster("p0", "d0") as (service, workers):
        numbers = {"num_running": 3, "kv_blocks_used": 7, "kv_blocks_free": 57, "ranks_silent_s": (0.0, 1.25)}
        stats = idle_stats(workers["d0"], **numbers)
        workers["d0"].send(stats)
        await until(lambda: any(worker.running == 3 for worker in service.state().workers))
        view = next(worker for worker in service.state().workers if worker.worker_id == "d0")
        assert (view.role, view.kv_blocks_used, view.kv_blocks_free, view.kv_blocks_total) == (Role.DECODE, 7, 57, 64)
        assert view.address.startswith("127.0.0.1:")
        assert view.ranks == (RankView(0, 1, "cpu", 0.0), RankView(1, 2, "cpu", 1.25))


async def test_drained_worker_hears_it_and_gets_no_new_work() -> None:
    async with cluster("p0", "d0", "d1") as (service, workers):
        assert service.drain_worker("d0", 5.0)
        assert not service.drain_worker("nobody", 5.0)
        await workers["d0"].until(lambda: workers["d0"].received == [Drain(5.0)])
        for idx in range(4):
            assert isinstance((await run(service, request(f"r{idx}")))[-1], Finished)
        assert len(workers["d0"].received) == 1
        states = {worker.worker_id: worker.state for worker in service.state().workers}
        assert states["d0"] is WorkerState.DRAINING


async def test_closing_refuses_new_requests_and_ends_running_ones_with_an_error() -> None:
    async with cluster("p0", "d0") as (service, workers):
        workers["d0"].is_paused = True
        reading = asyncio.create_task(run(service, request()))
        await workers["d0"].until(lambda: bool(workers["d0"].received))
        closing = asyncio.create_task(service.close(grace_s=0.05))
        await asyncio.sleep(0)
        refused = (await run(service, request("late")))[-1]
        assert isinstance(refused, Failed)
        assert isinstance(refused.error, NoReadyPair)
        last = (await reading)[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, NoReadyPair)
        await closing
        await workers["d0"].until(lambda: workers["d0"].num_routers_lost == 1)


async def test_worker_that_comes_back_under_a_new_incarnation_serves_again() -> None:
    index = InMemoryIndex()
    async with grpc_workers(index, "p0", "d0") as workers, running_service(index) as service:
        await until(lambda: service.readiness().is_ready)
        await workers["d0"].kill()
        await until(lambda: not service.readiness().is_ready)
        successor = GrpcWorker("d0", index, "2")
        await successor.start()
        await until(lambda: service.readiness().is_ready)
        assert isinstance((await run(service, request()))[-1], Finished)
        assert [type(message) for message in successor.received] == [Reserve]
        await successor.kill()


async def test_record_of_a_finished_request_shows_decisions_and_timings() -> None:
    async with cluster("p0", "d0") as (service, _):
        await run(service, request())
        record = service.request_record(RequestId("r"))
        assert record is not None
        assert record["status"] == "finished"
        decisions = record["decisions"]
        assert isinstance(decisions, list)
        assert [(decision["role"], decision["chosen"]) for decision in decisions] == [
            ("decode", "d0"),
            ("prefill", "p0"),
        ]
        assert {each["num_ranks"] for decision in decisions for each in decision["candidates"]} == {2}
        assert service.request_records(10) == [record]
        assert service.request_record(RequestId("unknown")) is None


class FlakyRegistry:
    """A registry that can be away, over one that is not."""

    def __init__(self, index: InMemoryIndex) -> None:
        self.is_away = False
        self.problem = ""
        self.num_polls = 0
        self._index = index

    async def live_workers(self) -> list[Registration] | None:
        self.num_polls += 1
        return None if self.is_away else await self._index.live_workers()


async def test_what_is_missing_is_named_where_no_request_could_be_served() -> None:
    index = InMemoryIndex()
    async with running_service(index) as service:
        assert service.readiness().reasons == ("no prefill worker is ready", "no decode worker is ready")
        index.problem = "Redis does not answer"
        assert service.readiness().reasons[0] == "Redis does not answer"
        async with grpc_workers(index, "p0", "d0"):
            await until(lambda: service.readiness().is_ready)


async def test_registry_that_is_away_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.registry.POLL_INTERVAL_S", 0.01)
    index = InMemoryIndex()
    registry = FlakyRegistry(index)
    config = RouterConfig(model=ModelConfig(path="tiny"), worker_silence_s=600.0)
    async with grpc_workers(index, "p0", "d0") as workers:
        service = RouterService(config, index, registry)
        await service.start()
        await until(lambda: service.readiness().is_ready)
        registry.is_away = True
        index.deregister(workers["d0"].info.ref)
        num_polls = registry.num_polls
        await until(lambda: registry.num_polls > num_polls + 10)
        assert isinstance((await run(service, request()))[-1], Finished)
        await service.close()


async def test_a_worker_whose_lease_is_missing_serves_on_and_is_connected_to_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.registry.POLL_INTERVAL_S", 0.01)
    async with cluster("p0", "d0") as (service, workers):
        registry = service._directory._registry = FlakyRegistry(workers["d0"].index)
        for worker in workers.values():
            worker.forget_lease()
        await until(lambda: registry.num_polls > 5)
        assert isinstance((await run(service, request("r0")))[-1], Finished)
        service._directory.drop(workers["d0"].info.ref, "the stream breaks", is_final=False)
        await workers["d0"].until(lambda: workers["d0"].num_routers_lost == 1)
        await until(lambda: service.readiness().is_ready)
        assert isinstance((await run(service, request("r1")))[-1], Finished)


@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_a_worker_with_neither_lease_nor_stream_is_given_up(
    monkeypatch: pytest.MonkeyPatch, says_goodbye: bool
) -> None:
    """At once when it ended the stream itself, after a while when the stream broke."""
    monkeypatch.setattr("router.registry.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("router.core.roster.UNLISTED_S", 600.0 if says_goodbye else 0.05)
    async with cluster("p0", "d0") as (service, workers):
        workers["d0"].forget_lease()
        if says_goodbye:
            workers["d0"]._streams.close()
        else:
            await workers["d0"].kill()
        await until(lambda: list(service._directory._clients) == [workers["p0"].info.ref])


async def test_frozen_worker_is_given_up_and_its_stream_closed() -> None:
    """The fake never reports by itself, so it is silent from the start."""
    async with cluster("p0", "d0", worker_silence_s=0.2) as (service, workers):
        workers["d0"].is_paused = True
        reading = asyncio.create_task(run(service, request(deadline_s=2.0)))
        await workers["d0"].until(lambda: workers["d0"].num_routers_lost >= 1)
        reading.cancel()
        await until(lambda: len(service.state().workers) == 2)  # it is connected again


async def test_worker_that_is_not_who_the_registry_says_is_not_used() -> None:
    index = InMemoryIndex()
    async with grpc_workers(index, "p0", "d0") as workers:
        address = (await index.live_workers() or [])[0].address
        index.register(Registration(workers["d0"].info.ref, Role.DECODE, address))  # the prefill worker's
        async with running_service(index) as service:
            await until(lambda: len(service.state().workers) == 1)
            assert service.state().workers[0].worker_id == "p0"


async def test_slow_index_delays_a_request_only_by_its_bound() -> None:
    class SlowIndex(InMemoryIndex):
        def known_prefix(self, hashes: object, workers: object) -> None:  # type: ignore[override]
            return None

        async def longest_prefix(self, hashes: object, workers: object) -> dict[WorkerRef, int]:
            await asyncio.Event().wait()
            return {}

    index = SlowIndex()
    async with grpc_workers(index, "p0", "d0"), running_service(index) as service:
        await until(lambda: service.readiness().is_ready)
        assert isinstance((await run(service, request()))[-1], Finished)


async def test_bug_in_the_core_ends_the_service_instead_of_hiding(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("p0", "d0") as (service, workers):

        def fail(*_: object) -> None:
            raise AssertionError("planted")

        monkeypatch.setattr("router.core.core.RouterCore._hear", fail)
        workers["d0"].send(idle_stats(workers["d0"]))
        with pytest.raises(ExceptionGroup):
            async with asyncio.timeout(60):
                await service.wait()


async def test_of_two_listed_lives_of_a_worker_only_the_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.registry.POLL_INTERVAL_S", 0.01)
    async with cluster("p0", "d0") as (service, workers):
        successor = GrpcWorker("d0", workers["d0"].index, "2")
        await successor.start()
        await workers["d0"].until(lambda: workers["d0"].num_routers_lost == 1)
        for idx in range(3):
            assert isinstance((await run(service, request(f"r{idx}")))[-1], Finished)
        assert (len(successor.received), workers["d0"].received) == (3, [])
        assert workers["d0"].num_routers_lost == 1
        await successor.kill()
