"""What the bench says of what it measured."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import ModelSpec
from tests.bench.failures import NOTES, spared
from tests.bench.floors import Machine, decode_floor, num_weights, prefill_floor
from tests.bench.peers_bench import by_turns
from tests.bench.plot import write_plot
from tests.bench.run import ratio, table

SPEC = ModelSpec("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e4, None, 1e-5, tie_embeddings=True)
MACHINE = Machine(read_bytes_per_s=37e9, flops_per_s=438e9)
FASTER: dict[str, Any] = {
    "metric": "a <b>",
    "unit": "tok/s",
    "ours": 30.0,
    "peers": {"x": 20.0},
    "floor": 60.0,
    "better": "higher",
}
SLOWER: dict[str, Any] = {
    "metric": "c",
    "unit": "ms",
    "ours": 30.0,
    "peers": {"x": 20.0},
    "floor": None,
    "better": "lower",
}


def test_a_ratio_above_one_is_in_our_favour() -> None:
    assert ratio(FASTER, 20.0) == pytest.approx(1.5)
    assert ratio(SLOWER, 20.0) == pytest.approx(2 / 3)


def test_a_line_has_peers_and_the_share_of_the_floor() -> None:
    first, second = table([FASTER, SLOWER]).splitlines()
    assert "x 20 (1.50 x)" in first
    assert "50 % of the floor" in first
    assert "x 20 (0.67 x)" in second
    assert "floor" not in second


def test_a_row_that_others_disturbed_says_so() -> None:
    lines = table([FASTER | {"others": 0.9}, SLOWER | {"others": 0.05}]).splitlines()
    assert ["disturbed" in line for line in lines] == [True, False]


def test_the_plot_is_well_formed_and_has_a_bar_per_value(tmp_path: Path) -> None:
    alone = {**SLOWER, "peers": {}}
    write_plot([FASTER, SLOWER, alone], tmp_path / "plot.svg")
    root = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    assert len(root.findall("{*}rect")) == 5


def test_floors_are_those_worked_out_by_hand() -> None:
    """The demo model: 134.5 M weights, 269 MB in bfloat16; 512 tokens are 108.7 + 9 GFLOP, less one causal half."""
    assert num_weights(SPEC) == pytest.approx(134.5e6, rel=0.001)
    assert decode_floor(MACHINE, SPEC, torch.bfloat16, 1, 0) == pytest.approx(37e9 / 269e6, rel=0.01)
    assert decode_floor(MACHINE, SPEC, torch.bfloat16, 32, 192) == pytest.approx(1360, rel=0.05)
    assert prefill_floor(MACHINE, SPEC, 512) == pytest.approx(1905, rel=0.06)


def test_a_peer_that_fails_costs_its_own_figures_and_is_named() -> None:
    def fails() -> int:
        raise RuntimeError("no\nuvloop")

    NOTES.clear()
    assert dict(spared({"ours": lambda: 1, "x": fails, "y": lambda: 3})) == {"ours": 1, "y": 3}
    assert NOTES == ["x: not measured, RuntimeError: no uvloop"]
    NOTES.clear()
    with pytest.raises(RuntimeError):
        dict(spared({"ours": fails}))


def test_a_peer_that_fails_in_a_later_round_is_left_out_of_all() -> None:
    calls: Iterator[Any] = iter([{"decode 1": 5.0}, RuntimeError("gone")])

    def flickers() -> dict[str, float]:
        value = next(calls)
        if isinstance(value, RuntimeError):
            raise value
        return value

    found = by_turns({"ours": lambda: {"decode 1": 2.0}, "x": flickers}, 3)
    NOTES.clear()
    assert found == {"ours": {"decode 1": 2.0}}
