"""LoRA adapters beside the base weights: what they add to each product of a layer, for the rows that want them.

The adapters of a step are laid side by side, so that a product of the model costs two small ones more however many
there are: all rows are multiplied by all A, what is not of a row's own adapter is set to zero, and all B follow. Rows
sorted by adapter would be multiplied by less and cost more calls: on a CPU slower up to four adapters or so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from common.checkpoint import ModelSpec
from common.checkpoint.adapters import AdapterFiles, LowRankPart
from common.checkpoint.families import layers_of
from common.checkpoint.layers import LayerSpec
from common.checkpoint.tensors import StoredTensor
from common.engine.contract.device import Layer, Linear, Mlp
from common.engine.model.layers import placed
from common.engine.model.weights import PLAIN

# Product of a layer -> the parts whose outputs follow one another in it.
PRODUCTS = {"qkv": ("q", "k", "v"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}


class LowRank(NamedTuple):
    """What one adapter adds to a product: (x @ down.T) @ up. Between blocks of several parts `up` is zero."""

    down: torch.Tensor  # [rank, in_features]
    up: torch.Tensor  # [rank, out_features], scale included


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """Per layer, by product; a product that it leaves alone is not there."""

    layers: tuple[Mapping[str, LowRank], ...]


class _Stacked(NamedTuple):
    """Several adapters' `LowRank` of one product."""

    down: torch.Tensor  # [ranks, in_features]
    up: torch.Tensor  # [ranks, out_features]
    ranks: tuple[int, ...]  # of each adapter, together those of `down`


class AdapterSet:
    """The adapters of a step, side by side. Immutable."""

    def __init__(self, adapters: Sequence[LoadedAdapter]) -> None:
        self.layers = [
            {name: stacked for name in PRODUCTS if (stacked := _stack([each.get(name) for each in layer])) is not None}
            for layer in zip(*(adapter.layers for adapter in adapters), strict=True)
        ]


class RowAdapters:
    """Which adapter of a set each row of a step wants, by its number; -1 = none. For one step."""

    def __init__(self, adapters: AdapterSet, numbers: torch.Tensor) -> None:
        """`numbers`: [num_tokens] int64, where the model is."""
        self._adapters = adapters
        self._numbers = numbers
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def at(self, rows: torch.Tensor | None) -> "RowAdapters":
        """Of some rows of the step, in their order; None = all."""
        return self if rows is None else RowAdapters(self._adapters, self._numbers[rows])

    def changed(self, idx: int, layer: Layer) -> Layer:
        """Layer number `idx` as these rows see it."""
        changes, mlp = self._adapters.layers[idx], layer.mlp
        if isinstance(mlp, Mlp):
            mlp = Mlp(self._plus(mlp.gate_up, changes.get("gate_up")), self._plus(mlp.down, changes.get("down")))
        qkv, output = (self._plus(getattr(layer, name), changes.get(name)) for name in ("qkv", "output"))
        return replace(layer, qkv=qkv, output=output, mlp=mlp)

    def _plus(self, base: Linear, change: _Stacked | None) -> Linear:
        if change is None:
            return base
        mask, apply = self._mask(change), base.apply

        def changed(x: torch.Tensor) -> torch.Tensor:
            return apply(x).addmm_((x @ change.down.T).mul_(mask), change.up)

        return Linear(base.in_features, base.out_features, changed)

    def _mask(self, change: _Stacked) -> torch.Tensor:
        """[num_rows, ranks]: 1 where the rank is of the row's adapter, else 0. Alike for most products."""
        if change.ranks not in self._masks:
            place, counts = self._numbers.device, torch.tensor(change.ranks)
            owners = torch.arange(len(change.ranks)).repeat_interleave(counts).to(place)
            self._masks[change.ranks] = (self._numbers[:, None] == owners).to(change.down.dtype)
        return self._masks[change.ranks]


def read_adapter(
    files: AdapterFiles, spec: ModelSpec, dtype: torch.dtype, place: torch.device | str = "cpu"
) -> LoadedAdapter:
    """Read the numbers that `open_adapter` found for a model of this shape. Raises OSError when a file is gone."""
    by_layer: list[dict[str, LowRankPart]] = [{} for _ in range(spec.num_layers)]
    for part in files.parts:
        by_layer[part.layer][part.part] = part
    return LoadedAdapter(
        tuple(
            {
                name: _product(layer, {part: found[part] for part in parts if part in found}, parts, dtype, place)
                for name, parts in PRODUCTS.items()
                if any(part in found for part in parts)
            }
            for layer, found in zip(layers_of(spec), by_layer, strict=True)
        )
    )


def _product(
    layer: LayerSpec,
    found: Mapping[str, LowRankPart],
    parts: Sequence[str],
    dtype: torch.dtype,
    place: torch.device | str,
) -> LowRank:
    sizes = {part: layer.weights[part][0] for part in parts}
    downs, up = [], torch.zeros(sum(each.down.shape[0] for each in found.values()), sum(sizes.values()))
    rank = column = 0
    for part, size in sizes.items():
        if part in found:
            down, rows = _read(found[part].down), _read(found[part].up) * found[part].scale
            if part in ("q", "k") and (layer.rope.size or layer.rope.is_interleaved):
                rows = placed(rows, layer)
            up[rank : rank + down.shape[0], column : column + size] = rows.T
            downs.append(down)
            rank += down.shape[0]
        column += size
    return LowRank(torch.cat(downs).to(place, dtype), up.to(place, dtype))


def _read(tensor: StoredTensor) -> torch.Tensor:
    """float32"""
    raw = np.fromfile(tensor.path, dtype=np.uint8, count=tensor.size_bytes, offset=tensor.offset)
    return torch.from_numpy(raw).view(PLAIN[tensor.kind]).view(tensor.shape).float()


def _stack(changes: Sequence[LowRank | None]) -> _Stacked | None:
    """None where no adapter changes the product."""
    some = [change for change in changes if change is not None]
    if not some:
        return None
    ranks = tuple(0 if change is None else change.down.shape[0] for change in changes)
    if len(some) == 1:
        return _Stacked(*some[0], ranks)
    return _Stacked(torch.cat([each.down for each in some]), torch.cat([each.up for each in some]), ranks)
