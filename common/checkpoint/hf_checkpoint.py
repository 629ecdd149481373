"""Reads a Hugging Face directory: configuration, tensors, tokenizer, chat template, generation defaults."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.checkpoint.checkpoint import Checkpoint, GenerationDefaults
from common.checkpoint.digest import digest_files
from common.checkpoint.fused_tensors import named_like_weights, split_fused, unstack_experts
from common.checkpoint.gpt_oss import find_gpt_oss
from common.checkpoint.hf_config import parse_config
from common.checkpoint.hf_tokenizer import read_chat_template, read_special_tokens, read_tokenizer
from common.checkpoint.model_files import read_json
from common.checkpoint.quantization import QuantizationConfig, read_quantization
from common.checkpoint.quantized_tensors import assemble
from common.checkpoint.safetensors_files import have_equal_bytes, stored_tensors, weight_files
from common.checkpoint.spec import CheckpointError, ModelSpec
from common.checkpoint.tensors import StoredTensor, Tensor, check_tensors

# Least, most, whether it is an integer: what a request may state (`router.request.spec`).
GENERATION_RANGES = {
    "temperature": (0.0, 2.0, False),
    "top_p": (math.nextafter(0.0, 1.0), 1.0, False),
    "top_k": (-1.0, math.inf, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.01, 100.0, False),
    "max_new_tokens": (1.0, math.inf, True),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HUB_DIRECTORY = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


def open_huggingface(path: Path) -> Checkpoint:
    """Read the metadata of a Hugging Face directory. Raises CheckpointError that names what is missing or unknown."""
    _refuse_other_directories(path)
    config = read_json(path / "config.json")
    tokenizer_config = read_json(path / "tokenizer_config.json", is_optional=True)
    generation = read_json(path / "generation_config.json", is_optional=True)
    special_tokens = read_special_tokens(path, tokenizer_config)
    tokenizer = read_tokenizer(path, tokenizer_config, special_tokens)
    spec, tensors = _model(path, config)
    quantization = read_quantization(config)
    return Checkpoint(
        path=path,
        format="huggingface",
        config=spec,
        tensors=tensors,
        chat_template=read_chat_template(path, tokenizer_config),
        special_tokens=special_tokens,
        bos_token_id=_id_of(tokenizer, special_tokens.get("bos_token")),
        eos_token_ids=tuple(
            token_id
            for token_id in _eos_token_ids(path, tokenizer, special_tokens, [generation, config])
            if token_id < spec.vocab_size  # none beyond it is ever drawn
        ),
        generation_defaults=_generation_defaults(generation),
        digest=digest_files([json.dumps(config, sort_keys=True).encode()], weight_files(path)),
        tokenizer_digest=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        served_name=served_name(path),
        build_tokenizer=lambda: tokenizer,
        stored_as=None if quantization is None else quantization.description,
    )


def served_name(path: Path) -> str:
    """The name that a person would give the directory: in the hub's cache, owner/name, else what they called it."""
    absolute = Path(os.path.abspath(path))  # a link keeps its own name
    if absolute.parent.name == "snapshots" and (found := HUB_DIRECTORY.fullmatch(absolute.parent.parent.name)):
        return f"{found['owner']}/{found['name']}"
    return absolute.name


def _refuse_other_directories(path: Path) -> None:
    """A directory that holds the model one level down, or as GGUF: say where."""
    if (path / "config.json").exists():
        return
    inside = [*sorted(path.glob("snapshots/*/config.json")), *sorted(path.glob("*.gguf"))]
    if inside:
        better = [str(file.parent if file.name == "config.json" else file) for file in inside[:3]]
        raise CheckpointError(f"{path} holds no config.json; name {' or '.join(better)} itself")


def _model(path: Path, config: dict[str, Any]) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The shape and the tensors to read. A head that a configuration calls tied and that differs is read, as
    transformers does."""
    spec, quantization = parse_config(config), read_quantization(config)
    stored = stored_tensors(path, has_codes=quantization is not None)
    tensors = _tensors(spec, quantization, stored)
    if spec.tie_embeddings and HEAD in tensors:
        embedding, head = tensors.get(EMBEDDING), tensors[HEAD]
        both = [one for one in (embedding, head) if isinstance(one, StoredTensor)]
        if len(both) == 2 and have_equal_bytes(*both):
            del tensors[HEAD]
        else:
            spec = replace(spec, tie_embeddings=False)
    check_tensors(path, spec, tensors)
    return spec, tensors


def _tensors(
    spec: ModelSpec, quantization: QuantizationConfig | None, stored: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """One tensor for each weight. Raises CheckpointError by name."""
    stored = named_like_weights(spec, stored)
    if spec.architecture == "gpt_oss":
        return find_gpt_oss(spec, stored)
    found = assemble(quantization, stored) if quantization is not None else stored
    return split_fused(spec, unstack_experts(spec, found))


def _eos_token_ids(
    path: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str | list[str]], sources: Iterable[dict[str, Any]]
) -> tuple[int, ...]:
    """The tokenizer's EOS (chat models end turns with it) first, then those that any file names."""
    ids = [_id_of(tokenizer, special_tokens.get("eos_token"))]
    for source in sources:
        declared = source.get("eos_token_id")
        several = declared if isinstance(declared, list) else [declared]
        if not all(each is None or (isinstance(each, int) and each >= 0) for each in several):
            raise CheckpointError(f"{path}: eos_token_id should be an integer or a list of them, got {declared!r}")
        ids += several
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _id_of(tokenizer: Tokenizer, token: str | list[str] | None) -> int | None:
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _generation_defaults(generation: dict[str, Any]) -> GenerationDefaults:
    """Every request that states nothing else takes them, so what no request may state is refused here."""
    advised = {name: generation[name] for name in GENERATION_RANGES if generation.get(name) is not None}
    for name, value in advised.items():
        low, high, is_whole = GENERATION_RANGES[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, int if is_whole else int | float)
            or not low <= value <= high
        ):
            kind = "an integer" if is_whole else "a number"
            raise CheckpointError(
                f"generation_config.json: {name} should be {kind} from {low:g} to {high:g}, got {value!r:.80}; "
                "correct it, or remove it"
            )
    return advised
