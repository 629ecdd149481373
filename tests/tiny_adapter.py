"""Writes a LoRA adapter for a model, as PEFT saves one, and the same model with it merged into the weights.

`python -m tests.tiny_adapter DIRECTORY [MODEL]` writes one of random numbers, to try adapters with; for the demo model
unless another is named.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from common.checkpoint.families import FUSED_PARTS, family_of, layers_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class TinyAdapter:
    """What to write. `gain` is how large the change is beside the weights."""

    rank: int = 4
    alpha: float = 8.0
    targets: Sequence[str] = PROJECTIONS
    seed: int = 0
    gain: float = 1.0
    fields: Mapping[str, Any] = field(default_factory=dict)  # of adapter_config.json, besides
    ranks: Mapping[str, int] = field(default_factory=dict)  # of some targets


def write_adapter(path: Path, model: Path, adapter: TinyAdapter | None = None) -> Path:
    """Write the directory (made if missing) and return it. The same arguments always write the same bytes."""
    adapter = adapter or TinyAdapter()
    path.mkdir(parents=True, exist_ok=True)
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none"},
        **{"r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0, "target_modules": [*adapter.targets]},
        **({"rank_pattern": dict(adapter.ranks)} if adapter.ranks else {}),
        **adapter.fields,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(_tensors(model, adapter), path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def _tensors(model: Path, adapter: TinyAdapter) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(adapter.seed)
    tensors = {}
    for name, (num_out, num_in) in _modules(model).items():
        target = name.rpartition(".")[2]
        if target in adapter.targets:
            rank = adapter.ranks.get(target, adapter.rank)
            down = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            up = torch.randn(num_out, rank, generator=generator) * adapter.gain * rank**-0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
    return tensors


def _modules(model: Path) -> dict[str, tuple[int, int]]:
    """The projections of all layers, by name, fused where the family fuses them: (outputs, inputs)."""
    spec = open_checkpoint(model).config
    names, found = family_of(spec).names, {}
    fused = {part: key for key, parts in FUSED_PARTS.items() if key in names for part in parts}
    for idx, layer in enumerate(layers_of(spec)):
        for part in ("q", "k", "v", "output", "gate", "up", "down"):
            if part in layer.weights:
                name = f"model.layers.{idx}.{names[fused.get(part, part)]}"
                num_out, num_in = layer.weights[part]
                found[name] = (found.get(name, (0, 0))[0] + num_out, num_in)
    return found


def write_merged(path: Path, model: Path, adapter: Path) -> Path:
    """The model, a Hugging Face directory, with the adapter's changes in its weights: W + scale * B @ A."""
    path.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, changes = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in changes.items():
        if ".lora_A." in name:
            rank = down.shape[0]
            scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
            up = changes[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[weight] = (weights[weight].double() + scale * (up.double() @ down.double())).float()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


if __name__ == "__main__":
    model = Path(sys.argv[2]) if len(sys.argv) > 2 else fetch_demo_model(print)
    print(write_adapter(Path(sys.argv[1]), model))
