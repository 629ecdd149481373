"""Breadth-first search of every state that a world of real cores can reach. Knows nothing of what it explores.

A world offers choices, applies one, and checks itself; it is copied by pickling, and its pickle is its identity
(equal states that were pickled differently are explored twice: slower, never wrong). Because the search is breadth
first, the path to a violation is a shortest one.
"""

import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class World(Protocol):
    """Deterministic: the same choice in the same state always leads to the same state."""

    def choices(self) -> Sequence[str]:
        """Everything that may happen next. A fault starts with "!"."""
        ...

    def apply(self, choice: str) -> None:
        """Let it happen. Raises AssertionError when something forbidden follows."""
        ...

    def check(self) -> None:
        """Raise AssertionError when this state is forbidden."""
        ...

    def check_quiet(self) -> None:
        """The same for a state in which nothing but faults can happen: everything must have ended."""
        ...


class Violation(AssertionError):
    """A property failed. The message holds the shortest list of choices that leads there."""


@dataclass(slots=True)
class Exploration:
    """What was explored."""

    num_states: int = 0
    num_transitions: int = 0
    num_quiet: int = 0
    is_complete: bool = True
    _parents: dict[int, tuple[int, str]] = field(default_factory=dict)
    _reversed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _quiet: list[int] = field(default_factory=list)

    def path(self, state: int) -> list[str]:
        """Choices from the start to a state."""
        choices: list[str] = []
        while state in self._parents:
            state, choice = self._parents[state]
            choices.append(choice)
        return choices[::-1]

    def check_progress(self) -> None:
        """From every state, without further faults, a quiet state can be reached."""
        reached, frontier = set(self._quiet), list(self._quiet)
        while frontier:
            for state in self._reversed[frontier.pop()]:
                if state not in reached:
                    reached.add(state)
                    frontier.append(state)
        stuck = min((state for state in range(self.num_states) if state not in reached), default=None)
        if stuck is not None and self.is_complete:
            raise Violation(_story("no way to an end without another fault", self.path(stuck)))


def explore(start: World, max_states: int) -> Exploration:
    """Visit every reachable state, `max_states` at most. Raises Violation at the first forbidden one."""
    result = Exploration()
    frontier = [pickle.dumps(start)]
    numbers = {frontier[0]: 0}
    result.num_states = 1
    while frontier:
        next_frontier: list[bytes] = []
        for snapshot in frontier:
            _expand(snapshot, numbers, next_frontier, result)
            if result.num_states >= max_states:
                result.is_complete = False
                return result
        frontier = next_frontier
    result.check_progress()
    return result


def _expand(snapshot: bytes, numbers: dict[bytes, int], frontier: list[bytes], result: Exploration) -> None:
    number = numbers[snapshot]
    choices = pickle.loads(snapshot).choices()
    if all(choice.startswith("!") for choice in choices):
        result.num_quiet += 1
        result._quiet.append(number)
        _guard(pickle.loads(snapshot).check_quiet, result.path(number))
    for choice in choices:
        world: World = pickle.loads(snapshot)
        _guard(lambda world=world, choice=choice: _step(world, choice), [*result.path(number), choice])  # type: ignore[misc]
        result.num_transitions += 1
        after = pickle.dumps(world)
        target = numbers.get(after)
        if target is None:
            target = numbers[after] = result.num_states
            result.num_states += 1
            result._parents[target] = (number, choice)
            frontier.append(after)
        if not choice.startswith("!"):
            result._reversed[target].append(number)


def _step(world: World, choice: str) -> None:
    world.apply(choice)
    world.check()


def _guard(action: object, path: list[str]) -> None:
    try:
        action()  # type: ignore[operator]
    except AssertionError as error:
        raise Violation(_story(str(error), path)) from error


def _story(problem: str, path: list[str]) -> str:
    steps = "\n".join(f"  {number:2}. {choice}" for number, choice in enumerate(path, 1))
    return f"{problem}\nshortest way there:\n{steps}"
