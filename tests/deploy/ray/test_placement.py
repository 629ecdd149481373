"""Which worker an actor is that an earlier controller left."""

import os
from collections.abc import Sequence
from pathlib import Path

from common.values.messages import Role
from deploy.ray.placement import FROZEN_S, IDENTITY_LIMIT_S, Ask, NamedActor, last_line_below, tell_apart

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
