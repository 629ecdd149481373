"""Which worker an actor is that an earlier controller left."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.values.config import ClusterConfig, WorkerSettings
from common.values.messages import Role
from deploy.ray.placement import (
    FROZEN_S,
    IDENTITY_LIMIT_S,
    Ask,
    ClusterPlacement,
    LocalPlacement,
    NamedActor,
    last_line_below,
    reserved_gpus,
    tell_apart,
)

P, D = Role.PREFILL, Role.DECODE


def actor(name: str, handle: str) -> NamedActor:
    """As made for `name`."""
    return NamedActor(Role(name.partition("-")[0]), name, handle)


def answers(*rounds: dict[str, str]) -> tuple[Ask, list[tuple[list[str], float]]]:
    """The ids that handles give in each round, and what was asked."""
    asked: list[tuple[list[str], float]] = []

    def ask(actors: Sequence[NamedActor], limit_s: float) -> list[tuple[Role, str] | None]:
        given = rounds[len(asked)]
        asked.append(([each.handle for each in actors], limit_s))
        names = [given.get(each.handle) for each in actors]
        return [name and (Role(name.partition("-")[0]), name) for name in names]  # type: ignore[misc]

    return ask, asked


def told(actors: list[NamedActor], ask: Ask) -> tuple[dict[str, str], list[str]]:
    """(handle by worker id, handles to be ended)."""
    found, ended = tell_apart(actors, ask)
    assert all(worker.role is Role(worker.worker_id.partition("-")[0]) for worker in found)
    return {worker.worker_id: worker.handle for worker in found}, [each.handle for each in ended]


def test_an_actor_is_what_it_says_and_keeps_the_role_of_its_place() -> None:
    ask, _ = answers({"x": "decode-1"})
    [worker], ended = tell_apart([actor("prefill-0", "x")], ask)
    assert (worker.role, worker.worker_id, worker.handle, worker.placed_as, ended) == (D, "decode-1", "x", P, [])


def test_one_that_waits_for_a_place_is_what_it_was_made_for_and_asked_once() -> None:
    ask, asked = answers({"y": "decode-0"})
    assert told([actor("prefill-0", "x"), actor("decode-0", "y")], ask) == ({"prefill-0": "x", "decode-0": "y"}, [])
    assert asked == [(["x", "y"], IDENTITY_LIMIT_S)]


def test_of_two_actors_made_for_one_name_neither_is_lost_when_the_changed_one_is_slow_to_answer() -> None:
    """x was prefill-0 and became decode-1; y is the prefill-0 that came after it."""
    ask, asked = answers({"y": "prefill-0"}, {"x": "decode-1"})
    pair = [actor("prefill-0", "x"), actor("prefill-0", "y")]
    assert told(pair, ask) == ({"prefill-0": "y", "decode-1": "x"}, [])
    assert asked == [(["x", "y"], IDENTITY_LIMIT_S), (["x"], FROZEN_S)]


def test_nor_when_the_other_one_has_no_place_yet() -> None:
    ask, _ = answers({}, {"x": "decode-1"})
    pair = [actor("prefill-0", "x"), actor("prefill-0", "y")]
    assert told(pair, ask) == ({"prefill-0": "y", "decode-1": "x"}, [])


def test_a_name_that_another_took_by_its_change_of_role_is_cleared_up_as_well() -> None:
    """x, made as prefill-0, became decode-0 after z, made as decode-0, had become prefill-1."""
    ask, asked = answers({"x": "decode-0"}, {"z": "prefill-1"})
    pair = [actor("prefill-0", "x"), actor("decode-0", "z")]
    assert told(pair, ask) == ({"decode-0": "x", "prefill-1": "z"}, [])
    assert asked[1] == (["z"], FROZEN_S)


def test_one_that_stays_silent_under_a_name_that_another_has_is_ended_and_not_forgotten() -> None:
    ask, _ = answers({"y": "prefill-0"}, {})
    assert told([actor("prefill-0", "x"), actor("prefill-0", "y")], ask) == ({"prefill-0": "y"}, ["x"])
    ask, _ = answers({}, {})
    assert told([actor("prefill-0", "x"), actor("prefill-0", "y")], ask) == ({"prefill-0": "x"}, ["y"])


def test_the_last_line_of_the_log_that_was_written_to_last_says_why_nothing_starts(tmp_path: Path) -> None:
    assert "there is none" in last_line_below(tmp_path)
    for age_s, name, text in (
        (9, "raylet.err", "old\n"),
        (5, "worker-1.err", "one\nexec: no such file\n:job_id:01\n\n"),
        (2, "worker-3.err", ":job_id:01\n:actor_name:Worker\n"),
        (1, "gcs.out", "x"),
    ):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1000 - age_s, 1000 - age_s))
    (tmp_path / "worker-2.err").touch()
    assert last_line_below(tmp_path) == "exec: no such file (worker-1.err)"


def test_where_nothing_runs_nothing_is_found() -> None:
    ask, _ = answers({})
    assert tell_apart([], ask) == ([], [])


def test_an_actor_reserves_the_gpus_of_all_its_ranks_and_says_what_it_waits_for() -> None:
    """The ranks are its own processes, so they are on its node whatever Ray packs."""
    settings = WorkerSettings(num_gpus=0.5, tensor_parallel_size=4)
    placement = ClusterPlacement(ClusterConfig(decode_worker=settings))
    assert reserved_gpus(placement.worker_config(D, "decode-0")) == 2.0
    assert placement.what_it_waits_for(D) == "waits for a Ray node that offers 1 pd_decode and 2 GPU"
    assert placement.what_it_waits_for(P) == "waits for a Ray node that offers 1 pd_prefill"


class Ray:
    """Notes the options of the actors that are made."""

    def __init__(self) -> None:
        self.options: list[Mapping[str, Any]] = []

    def actor(self, role: Role, options: Mapping[str, Any]) -> "Ray":
        self.options.append(options)
        return self

    def remote(self, *arguments: object, **fields: object) -> str:
        return "handle"


def test_each_worker_of_this_machine_sees_one_gpu_and_one_of_a_cluster_what_it_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    monkeypatch.setattr("deploy.ray.placement._actor", ray.actor)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    local = LocalPlacement(ClusterConfig(), tmp_path)
    for role in (P, D):
        local.create(role, f"{role.value}-0")
    assert [each["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for each in ray.options] == ["4", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    local.create(P, "prefill-0")
    assert "CUDA_VISIBLE_DEVICES" not in ray.options[-1]["runtime_env"]["env_vars"]
    ClusterPlacement(ClusterConfig(prefill_worker=WorkerSettings(num_gpus=1))).create(P, "prefill-0")
    assert ray.options[-1]["num_gpus"] == 1
