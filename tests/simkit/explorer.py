"""Breadth-first search of every state that a world of real cores can reach. Knows nothing of what it explores.

A world offers choices, applies one, and checks itself. Because the search is breadth first, the path to a violation
is a shortest one.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.simkit.snapshots import copy_of, key_of, restore


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

    def key_parts(self) -> object:
        """All that makes this state what it is: states with equal parts are one."""
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


Progress = Callable[[Exploration, int], None]


def explore(start: World, max_states: int, progress: Progress = lambda so_far, num_waiting: None) -> Exploration:
    """Visit every reachable state, `max_states` at most. Raises Violation at the first forbidden one.

    `progress` is called with every state that was expanded, and how many wait for it.
    """
    result = Exploration(num_states=1)
    frontier = [(0, copy_of(start))]
    numbers = {_key(start): 0}
    while frontier:
        next_frontier: list[tuple[int, bytes]] = []
        for idx, (number, copy) in enumerate(frontier):
            _expand(number, copy, numbers, next_frontier, result)
            progress(result, len(frontier) - idx - 1 + len(next_frontier))
            if result.num_states >= max_states:
                result.is_complete = False
                return result
        frontier = next_frontier
    result.check_progress()
    return result


def _expand(
    number: int, copy: bytes, numbers: dict[bytes, int], frontier: list[tuple[int, bytes]], result: Exploration
) -> None:
    world: World = restore(copy)
    choices = world.choices()
    if all(choice.startswith("!") for choice in choices):
        result.num_quiet += 1
        result._quiet.append(number)
        _guard(world.check_quiet, result, number, ())
    for idx, choice in enumerate(choices):
        world = world if idx == 0 else restore(copy)
        _guard(lambda world=world, choice=choice: _step(world, choice), result, number, (choice,))  # type: ignore[misc]
        result.num_transitions += 1
        key = _key(world)
        target = numbers.get(key)
        if target is None:
            target = numbers[key] = result.num_states
            result.num_states += 1
            result._parents[target] = (number, choice)
            frontier.append((target, copy_of(world)))
        if not choice.startswith("!"):
            result._reversed[target].append(number)


def _key(world: World) -> bytes:
    """A digest keeps millions of states small; two that collide would be 2^-128 bad luck."""
    return hashlib.blake2b(key_of(world.key_parts()), digest_size=16).digest()


def _step(world: World, choice: str) -> None:
    world.apply(choice)
    world.check()


def _guard(action: Callable[[], None], result: Exploration, number: int, last: tuple[str, ...]) -> None:
    try:
        action()
    except Exception as error:
        problem = str(error) if isinstance(error, AssertionError) else repr(error)
        raise Violation(_story(problem, [*result.path(number), *last])) from error


def _story(problem: str, path: list[str]) -> str:
    steps = "\n".join(f"  {number:2}. {choice}" for number, choice in enumerate(path, 1))
    return f"{problem}\nshortest way there:\n{steps}"
