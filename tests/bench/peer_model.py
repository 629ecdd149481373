"""The demo model in the forms that peers read: a Hugging Face directory in bfloat16, and GGUF files."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.checkpoint import Checkpoint
from common.engine.model.weights import load_tensors

HOME = Path("build/peers/model")


def huggingface_directory(checkpoint: Checkpoint) -> Path:
    """Idempotent. The same weights as ours: dequantized once, rounded to bfloat16."""
    if not (HOME / "written").exists():
        HOME.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in load_tensors(checkpoint, torch.bfloat16)}
        save_file(tensors, str(HOME / "model.safetensors"), metadata={"format": "pt"})
        (HOME / "config.json").write_text(json.dumps(_config(checkpoint), indent=1))
        checkpoint.tokenizer().save(str(HOME / "tokenizer.json"))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
        (HOME / "tokenizer_config.json").write_text(json.dumps(names))
        (HOME / "written").touch()
    return HOME


def gguf_file(checkpoint: Checkpoint, kind: str, quantize: Path) -> Path:
    """BF16, Q8_0 or Q4_0, by llama.cpp's own tool. Idempotent."""
    target = HOME / f"{kind}.gguf"
    if not target.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        command = [str(quantize), "--allow-requantize", str(checkpoint.path), str(partial), kind]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        shutil.move(partial, target)
    return target


def plain_environment() -> dict[str, str]:
    """Ours without what the bench sets for itself: waiting threads of peers may spin as they like."""
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


def _config(checkpoint: Checkpoint) -> dict[str, object]:
    spec = checkpoint.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
