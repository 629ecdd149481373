"""Kernel tests run under Triton's interpreter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interpreter import import_triton_interpreted

import_triton_interpreted()

GridOrder = Callable[[int], list[int]]


@pytest.fixture
def run_in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[GridOrder], None]]:
    """Make the interpreter visit programs in another order: a permutation of the linear program index."""
    from triton.runtime.interpreter import interpreter_builder

    natural = interpreter_builder.set_grid_idx

    def set_order(order: GridOrder) -> None:
        def visit(x: int, y: int, z: int) -> Any:
            grid_x, grid_y, grid_z = (int(dim) for dim in interpreter_builder.grid_dim)
            linear = order(grid_x * grid_y * grid_z)[(x * grid_y + y) * grid_z + z]
            return natural(linear // (grid_y * grid_z), linear // grid_z % grid_y, linear % grid_z)

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", visit)

    yield set_order
