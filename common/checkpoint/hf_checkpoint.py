"""Reads a Hugging Face directory: configuration, tokenizer, chat template, generation defaults."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.checkpoint.checkpoint import Checkpoint, GenerationDefaults
from common.checkpoint.digest import digest_files
from common.checkpoint.hf_config import parse_config
from common.checkpoint.spec import CheckpointError

GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def open_huggingface(path: Path) -> Checkpoint:
    """Read the metadata of a Hugging Face directory. Raises CheckpointError that names what is missing or unknown."""
    config = _read_json(path / "config.json")
    tokenizer_config = _read_json(path / "tokenizer_config.json", is_optional=True)
    generation = _read_json(path / "generation_config.json", is_optional=True)
    tokenizer_text = _read_bytes(path / "tokenizer.json")
    tokenizer = _plain_tokenizer(tokenizer_text)
    bos_token = _special_token(tokenizer_config, "bos_token")
    eos_token = _special_token(tokenizer_config, "eos_token")
    eos_token_ids = _eos_token_ids(eos_token, tokenizer, generation, config)
    return Checkpoint(
        path=path,
        format="huggingface",
        config=parse_config(config),
        chat_template=_chat_template(path, tokenizer_config),
        bos_token=bos_token,
        bos_token_id=tokenizer.token_to_id(bos_token) if bos_token else None,
        eos_token=eos_token,
        eos_token_id=eos_token_ids[0] if eos_token_ids else None,
        eos_token_ids=eos_token_ids,
        generation_defaults=_generation_defaults(generation),
        digest=digest_files([json.dumps(config, sort_keys=True).encode()], weight_files(path)),
        tokenizer_digest=hashlib.sha256(tokenizer_text).hexdigest(),
        served_name=path.resolve().name,
        build_tokenizer=lambda: tokenizer,
    )


def _plain_tokenizer(text: bytes) -> Tokenizer:
    """Without the truncation and padding that the file's last user had set: they would cut prompts or fill them up."""
    tokenizer = Tokenizer.from_str(text.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: those of the index, else model.safetensors."""
    index = path / "model.safetensors.index.json"
    names = set(_read_json(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
    files = [path / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path}: weight files are missing: {', '.join(missing)}")
    return files


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    if is_optional and not path.exists():
        return {}
    content = _read_bytes(path)
    try:
        value = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return value


def _special_token(tokenizer_config: dict[str, Any], name: str) -> str | None:
    """A special token is written as a string or as an AddedToken object."""
    token = tokenizer_config.get(name)
    return token["content"] if isinstance(token, dict) else token


def _eos_token_ids(
    eos_token: str | None, tokenizer: Tokenizer, generation: dict[str, Any], config: dict[str, Any]
) -> tuple[int, ...]:
    """The tokenizer's EOS (chat models end turns with it) and those of generation_config, else of config."""
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    declared = generation.get("eos_token_id", config.get("eos_token_id"))
    several = declared if isinstance(declared, list) else [declared]
    return tuple(dict.fromkeys(token_id for token_id in (own, *several) if token_id is not None))


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The template of its own file, else of tokenizer_config.json, where it may be a list of named ones."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _generation_defaults(generation: dict[str, Any]) -> GenerationDefaults:
    return {name: generation[name] for name in GENERATION_FIELDS if generation.get(name) is not None}
