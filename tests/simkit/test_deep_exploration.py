"""The command that explores every world keeps what it found, one entry per world."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.simkit import deep_exploration
from tests.simkit.cluster_worlds import DEEP_WORLDS
from tests.simkit.deep_exploration import add, all_worlds, explore_world, in_words, main
from tests.simkit.explorer import Violation


def found(world: str, states: int) -> dict[str, Any]:
    counts = {"world": world, "states": states, "transitions": 3, "ends": 1, "is_complete": True}
    return {**counts, "seconds": 1.0, "megabytes": 50, "date": "2026-01-01"}


def test_no_world_is_cut_short() -> None:
    names = list(all_worlds())
    assert {f"cluster: {name}" for name in DEEP_WORLDS} < set(names)
    assert [name for name in names if getattr(all_worlds()[name], "max_states", None) is not None] == []


def test_a_world_is_explored_as_a_whole_and_progress_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deep_exploration, "SAY_EVERY_S", 0.0)
    result = explore_world("handoff: no fault", 10_000)
    assert result["is_complete"]
    assert result["transitions"] > result["states"] > 100
    assert "to be expanded" in capsys.readouterr().err
    assert "handoff: no fault: all " in in_words(result)


def test_a_later_run_of_a_world_replaces_the_earlier_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "exploration.json"
    for name, states in (("cluster: no fault", 5), ("handoff: no fault", 6), ("cluster: no fault", 7)):
        add(path, found(name, states))
    kept = json.loads(path.read_text())
    assert [(each["world"], each["states"]) for each in kept] == [("handoff: no fault", 6), ("cluster: no fault", 7)]


def test_each_world_is_told_when_it_ends_and_not_in_its_turn() -> None:
    names = ["cluster: no fault", "handoff: loss is reported twice"]
    assert [each["world"] for each in deep_exploration.explore_all(names, 10_000, 2)] == names[::-1]


def begin(name: str, max_states: int) -> dict[str, Any]:
    """In place of `explore_world`, in a process of its own."""
    with open(os.environ["BEGUN"], "a") as file:
        file.write(f"{name}\n")
    if name == "bad":
        raise Violation("found")
    return found(name, 1)


def test_after_a_violation_hardly_another_world_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two may have been handed out before it is known."""
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    monkeypatch.setattr(deep_exploration, "explore_world", begin)
    with pytest.raises(Violation, match="found"):
        list(deep_exploration.explore_all(["bad", *map(str, range(8))], 10_000, 1))
    assert len((tmp_path / "begun").read_text().split()) <= 4


def test_only_what_is_missing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def explore_all(names: list[str], max_states: int, jobs: int) -> list[dict[str, Any]]:
        asked.extend(names)
        return [found(name, 1) for name in names]

    monkeypatch.setattr(deep_exploration, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(deep_exploration, "OUTPUT", tmp_path / "out.json")
    monkeypatch.setattr(deep_exploration, "explore_all", explore_all)
    add(tmp_path / "kept.json", found("handoff: no fault", 6))
    assert main(["--missing", "no fault"]) == 0
    assert asked == ["cluster: no fault"]
    assert "1 worlds in" in capsys.readouterr().out
