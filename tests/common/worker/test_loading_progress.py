"""A worker that loads says how far it is, in Redis, until it is ready or has failed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cluster.reports import LoadingWorker, loading_reports, parsed
from common.engine.contract.progress import LoadPhase
from common.engine.loading import load_model
from common.values.config import ModelConfig, WorkerConfig
from common.worker.loading_progress import LoadingProgress, shown_loading
from deploy.client.loading_watch import LoadingWatch
from tests.redis_box import RedisBox, binaries, redis_box
from tests.tiny_model import write_tiny_model
from tests.waiting import until


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisBox]:
    with redis_box(binaries()[0], tmp_path_factory.mktemp("redis")) as server:
        yield server


def config_of(redis_url: str, namespace: str, path: Path | str = "") -> WorkerConfig:
    model = ModelConfig(path=str(path))
    return WorkerConfig(
        role="prefill", worker_id="prefill-0", model=model, redis_url=redis_url, namespace=namespace, num_blocks=8
    )


def test_loading_goes_through_its_phases_in_order_and_reads_all_weights(tmp_path: Path) -> None:
    seen: list[tuple[LoadPhase, float]] = []
    model = write_tiny_model(tmp_path / "tiny")
    load_model(config_of("", "n", model), lambda phase, share: seen.append((phase, share)))
    assert list(dict.fromkeys(phase for phase, _ in seen)) == list(LoadPhase)
    shares = [share for phase, share in seen if phase is LoadPhase.WEIGHTS]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 10


async def test_what_is_noted_is_seen_by_others_until_the_block_is_left(box: RedisBox) -> None:
    reports = loading_reports(box.url, "shown")

    async def seen() -> tuple[LoadingWorker, ...]:
        return parsed(LoadingWorker, await reports.live() or {})

    async with shown_loading(config_of(box.url, "shown")) as note:
        await asyncio.to_thread(note, LoadPhase.WEIGHTS, 0.5)

        async def is_told() -> bool:
            return [(w.worker_id, w.role, w.phase, w.share) for w in await seen()] == [
                ("prefill-0", "prefill", "reading weights", 0.5)
            ]

        await until(is_told)
    assert await seen() == ()
    await reports.aclose()


async def test_a_worker_that_fails_to_load_is_not_loading_any_more(box: RedisBox) -> None:
    reports = loading_reports(box.url, "fails")
    with pytest.raises(RuntimeError, match="no such model"):
        async with shown_loading(config_of(box.url, "fails")):
            raise RuntimeError("no such model")
    assert await reports.live() == {}
    await reports.aclose()


async def test_loading_does_not_wait_for_a_redis_that_is_away() -> None:
    async with shown_loading(config_of("redis://127.0.0.1:9", "away")) as note:
        note(LoadPhase.CACHE, 0.0)


def test_the_log_has_a_line_per_phase_and_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadingProgress("prefill-0", "prefill")
    for step in range(101):
        progress.note(LoadPhase.WEIGHTS, step / 100)
    progress.note(LoadPhase.SELF_TEST, 0.0)
    output = capsys.readouterr()
    assert (output.out + output.err).count("worker_loading_phase") == 6


def test_whoever_waits_hears_of_each_phase_and_quarter_once_and_of_a_second_life_again() -> None:
    said: list[tuple[str, str]] = []
    watch = LoadingWatch(lambda who, what: said.append((who, what)))

    def look(phase: str, share: float) -> None:
        watch.show([LoadingWorker("d-0", "decode", phase, share, 1.0)])

    for phase, share in (
        ("reading weights", 0.1),
        ("reading weights", 0.2),
        ("reading weights", 0.4),
        ("self-test", 0.0),
    ):
        look(phase, share)
        look(phase, share)
    watch.show([])
    look("self-test", 0.0)
    assert said == [
        ("d-0", "reading weights, 10 %"), ("d-0", "reading weights, 40 %"), ("d-0", "self-test"), ("d-0", "self-test"),
    ]  # fmt: skip
