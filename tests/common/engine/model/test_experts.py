"""Mixtures of experts: the layouts of their weights, which layers have them, what is computed, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import CheckpointError, open_checkpoint
from common.checkpoint.layers import Routing
from common.engine.contract.device import Linear, Mlp
from common.engine.contract.elementwise import TorchElementwise
from common.engine.contract.experts import TorchExperts
from common.engine.model.experts import choose
from common.engine.model.weights import open_weights
from tests.common.engine.model.test_architectures import TOKENS, forward_in_chunks, load
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_model import EXPERT_PARTS, NUM_EXPERTS, TinyModel, write_tiny_model

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def edit(path: Path, **changes: Any) -> None:
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def packed(tensors: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """As transformers 5 holds them: all experts of a layer in two tensors, the router under `mlp`."""
    where, router, gate, up, down = EXPERT_PARTS[architecture]
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        experts = [f"{prefix}.{where}.experts.{expert}" for expert in range(NUM_EXPERTS)]
        both = [torch.cat([tensors[f"{each}.{part}.weight"] for part in (gate, up)]) for each in experts]
        found[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(both)
        found[f"{prefix}.mlp.experts.down_proj"] = torch.stack([tensors[f"{each}.{down}.weight"] for each in experts])
        found[f"{prefix}.mlp.gate.weight"] = found.pop(f"{prefix}.{where}.{router}.weight")
    return found


def transformers_logits(path: Path) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_packed_experts_are_those_of_the_files_with_one_tensor_each(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture))
    expected = forward_in_chunks(*load(path), [20])
    rewrite(path, lambda tensors: packed(tensors, architecture))
    assert torch.equal(forward_in_chunks(*load(path), [20]), expected)
    torch.testing.assert_close(transformers_logits(path), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_gguf_file_gives_the_logits_of_its_directory(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture))
    expected = forward_in_chunks(*load(path), [20])
    converted = write_tiny_gguf(path, tmp_path / "m.gguf")
    torch.testing.assert_close(forward_in_chunks(*load(converted), [7, 13]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fields", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"norm_topk_prob": True}])
@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe"])
def test_layers_and_weights_are_chosen_as_transformers_chooses_them(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture))
    edit(path, norm_topk_prob=False)
    before = forward_in_chunks(*load(path), [20])
    if "norm_topk_prob" not in fields:
        dense = load_file(write_tiny_model(tmp_path / "dense", TinyModel()) / "model.safetensors")
        mlp = {name: tensor for name, tensor in dense.items() if name.startswith("model.layers.0.mlp.")}
        rewrite(path, lambda tensors: {n: t for n, t in tensors.items() if "layers.0.mlp" not in n} | mlp)
    edit(path, **fields)
    found = forward_in_chunks(*load(path), [7, 13])
    torch.testing.assert_close(found, transformers_logits(path), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)


def test_a_row_is_multiplied_by_the_weights_of_its_own_experts_only() -> None:
    rows_of: dict[int, int] = {}
    ops, weights = TorchElementwise(), torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))

    def expert(idx: int) -> Mlp:
        def gate_up(x: torch.Tensor) -> torch.Tensor:
            rows_of[idx] = rows_of.get(idx, 0) + x.shape[0]
            return x @ weights[idx].T

        return Mlp(Linear(8, 6, gate_up), Linear(3, 8, lambda x: x @ weights[idx][:3]))

    x, expert_ids = torch.randn(5, 8), torch.tensor([[0, 2], [2, 0], [2, 3], [0, 2], [3, 2]])
    shares = torch.rand(5, 2)
    found = TorchExperts([expert(idx) for idx in range(4)], ops.silu_mul)(x, expert_ids, shares)
    assert rows_of == {0: 3, 2: 5, 3: 2}
    for row in range(5):
        parts = (ops.silu_mul(x[row : row + 1] @ weights[e].T) @ weights[e][:3] for e in expert_ids[row])
        expected = sum(share * part[0] for share, part in zip(shares[row], parts, strict=True))
        torch.testing.assert_close(found[row], expected)


def test_dividing_by_the_sum_of_the_chosen_is_the_softmax_over_the_chosen() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 1.0]])
    expert_ids, weights = choose(Routing(4, 2, is_normalized=True, scale=2.5), logits)
    assert expert_ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, 2.5 * torch.tensor([[2.0, 1.0]]).softmax(-1))


def test_layers_that_only_draft_are_not_read(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture="glm4_moe"))
    expected = forward_in_chunks(*load(path), [20])
    extra = {"model.layers.2.eh_proj.weight": torch.ones(3), "model.layers.2.mlp.gate.weight": torch.ones(3)}
    rewrite(path, lambda tensors: tensors | extra)
    with pytest.raises(CheckpointError, match=r"weights that the model does not use: model.layers.2"):
        open_checkpoint(path)
    edit(path, num_nextn_predict_layers=1)
    assert torch.equal(forward_in_chunks(*load(path), [20]), expected)


def test_the_bias_of_the_choice_keeps_its_digits_in_bfloat16(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture="glm4_moe"))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    weights = open_weights(open_checkpoint(path), torch.bfloat16)
    found = weights.take(f"{name}.weight", (NUM_EXPERTS,), torch.float32)
    assert torch.equal(found, load_file(path / "model.safetensors")[name])


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_local_experts=8"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts should be a positive integer, got 0"),
        ("mixtral", {"num_local_experts": 9}, r"block_sparse_moe.gate.weight: expected shape \(9, 64\)"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported beside experts"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers should be a list of integers, got '0'"),
        ("glm4_moe", {"topk_group": 5}, "n_group=4, topk_group=5 do not fit the experts"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False is not supported"),
        ("qwen2_moe", {"moe_intermediate_size": 16}, r"experts.0.gate_proj.weight: expected shape \(16, 64\)"),
    ],
)
def test_what_a_mixture_cannot_be_is_named(
    tmp_path: Path, architecture: str, fields: dict[str, Any], words: str
) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture=architecture))
    edit(path, **fields)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_a_stack_of_experts_of_another_shape_is_named(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture="qwen3_moe"))

    def cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "model.layers.1.mlp.experts.down_proj"
        return packed(tensors, "qwen3_moe") | {name: torch.zeros(7, 64, 32)}

    rewrite(path, cut)
    with pytest.raises(CheckpointError, match=r"experts.down_proj: expected shape \(8, 64, 32\), .*got \(7, 64, 32\)"):
        open_checkpoint(path)


def test_the_fields_of_a_gguf_mixture_are_named(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture="qwen3_moe"))
    file = write_tiny_gguf(path, tmp_path / "m.gguf", qwen3moe__expert_gating_func=2)
    with pytest.raises(CheckpointError, match=r"expert_gating_func should be 1 \(softmax\)"):
        open_checkpoint(file)
    with pytest.raises(CheckpointError, match=r"qwen3.expert_count is not supported"):
        open_checkpoint(write_tiny_gguf(_dense(tmp_path), tmp_path / "n.gguf", qwen3__expert_count=8))


def _dense(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "dense", TinyModel(architecture="qwen3"))
