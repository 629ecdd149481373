"""Files as an unfinished download, a wrong copy or another tool leaves them: each is refused, with its name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import CheckpointError, open_checkpoint
from router.text.tokenizer import check_model
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_model import write_tiny_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"),
    *("chat_template.jinja", "special_tokens_map.json", "model.safetensors.index.json"),
)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.mark.parametrize("name", [*FILES, "model.gguf"])
@pytest.mark.parametrize(("text", "words"), [(POINTER, "git-lfs pointer.*git lfs pull"), ("", "is empty; download")])
def test_a_pointer_or_an_empty_file_is_named(model_path: Path, name: str, text: str, words: str) -> None:
    (model_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name} is .*{words}|{name} {words}"):
        open_checkpoint(model_path / name if name.endswith("gguf") else model_path)


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def _header(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def _tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def _index(path: Path, content: object) -> None:
    (path.parent / "model.safetensors.index.json").write_text(json.dumps(content))


Damage = Callable[[Path], None]
WEIGHTS: dict[str, tuple[Damage, str]] = {
    "cut in its last tensor": (lambda path: _cut(path, path.stat().st_size - 1), "is cut off: .* download it again"),
    "cut in its header": (lambda path: _cut(path, 100), "is cut off within its header"),
    "cut in its first bytes": (lambda path: _cut(path, 3), "model.safetensors"),
    "no JSON": (lambda path: _header(path, b"{x}"), "header is damaged"),
    "no object": (lambda path: _header(path, b"[]"), "header is damaged"),
    "no offsets": (lambda path: _header(path, b'{"a":{"dtype":"F32","shape":[1]}}'), "header is damaged"),
    "FP8": (
        lambda path: _tensors(path, lm_head__weight=torch.zeros(4, 4).to(torch.float8_e4m3fn)),
        "lm_head.weight is of type F8_E4M3; only F64, F32, F16, BF16 are read",
    ),
    "a weight less": (lambda path: _tensors(path, lm_head__weight=None), "weight lm_head.weight is missing"),
    "a weight more": (lambda path: _tensors(path, extra=torch.ones(1)), "weights that the model does not use: extra"),
    "another shape": (lambda path: _tensors(path, model__norm__weight=torch.ones(3)), r"model.norm.weight: .*\(3,\)"),
    "no index map": (lambda path: _index(path, {"metadata": {}}), "index.json has no weight_map"),
    "another index map": (lambda path: _index(path, {"weight_map": [1]}), "index.json has no weight_map"),
    "an index of what is not there": (
        lambda path: _index(path, {"weight_map": {"lm.weight": path.name}}),
        "model.safetensors does not hold lm.weight, which model.safetensors.index.json says it does",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weights_are_refused_by_name(model_path: Path, name: str) -> None:
    damage, words = WEIGHTS[name]
    damage(model_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(model_path)


def test_a_page_of_html_is_no_safetensors_file(model_path: Path) -> None:
    (model_path / "model.safetensors").write_text("<!doctype html><html>")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        open_checkpoint(model_path)


def test_a_directory_with_two_models_is_refused(model_path: Path) -> None:
    tensors = load_file(model_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model_path / "other.safetensors")
    _index(model_path / "x", {"weight_map": dict.fromkeys(tensors, "other.safetensors")})
    with pytest.raises(CheckpointError, match=r"holds two models: model.safetensors and .*remove one"):
        open_checkpoint(model_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "pytorch_model.bin cannot stand in for it: save the model as safetensors"),
        ("consolidated.safetensors", "consolidated.safetensors cannot stand in"),
    ],
)
def test_weights_of_another_kind_are_named(model_path: Path, name: str, words: str) -> None:
    (model_path / "model.safetensors").rename(model_path / name)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(model_path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", "\udcff", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json should hold a JSON object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"7": {"content": "<s>"}}}',
            "'<s>' has id 7 in one file and 0",
        ),
        ("chat_template.jinja", "{% for x in %}", "tiny: the chat template cannot be compiled: "),
        ("chat_template.jinja", "{{ x | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("chat_template.jinja", "\udcff", "chat_template.jinja is not UTF-8"),
        ("chat_template.json", '{"chat_template": 3}', "chat_template should be text"),
        ("config.json", "[" * 100_000 + "]" * 100_000, "config.json is nested too deeply"),
        ("generation_config.json", '{"temperature": "0.7"}', "temperature should be a number from 0 to 2, got '0.7'"),
        ("generation_config.json", '{"temperature": NaN}', "temperature should be a number from 0 to 2, got nan"),
        ("generation_config.json", '{"top_p": 0.0}', "top_p should be a number"),
        ("generation_config.json", '{"top_k": 50.0}', "top_k should be an integer from -1 to inf, got 50.0"),
        (
            "generation_config.json",
            '{"repetition_penalty": 0}',
            "repetition_penalty should be a number from 0.01 to 100",
        ),
        ("generation_config.json", '{"max_new_tokens": true}', "max_new_tokens should be an integer"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id should be an integer or a list of them"),
    ],
)
def test_a_damaged_text_file_is_refused_before_anything_is_started(
    model_path: Path, name: str, text: str, words: str
) -> None:
    if name == "chat_template.json":
        (model_path / "chat_template.jinja").unlink()
    (model_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=words):
        check_model(model_path)


def test_a_directory_without_tokenizer_json_says_how_to_get_one(model_path: Path) -> None:
    (model_path / "tokenizer.json").unlink()
    (model_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(CheckpointError, match=r"tokenizer.json.*save_pretrained\(DIR\) writes it"):
        check_model(model_path)


def test_a_directory_that_only_contains_the_model_names_it(model_path: Path) -> None:
    hub = model_path.parent / "models--org--name"
    write_tiny_model(hub / "snapshots" / "abc")
    with pytest.raises(CheckpointError, match=r"name .*/snapshots/abc itself"):
        open_checkpoint(hub)
    write_tiny_gguf(model_path, model_path.parent / "files.gguf")
    with pytest.raises(CheckpointError, match=r"name .*files.gguf itself"):
        open_checkpoint(model_path.parent)


@pytest.mark.parametrize("name", ["a whole model", "a GGUF file"])
def test_a_whole_model_passes_the_check(model_path: Path, name: str) -> None:
    path = write_tiny_gguf(model_path, model_path / "m.gguf") if name == "a GGUF file" else model_path
    assert check_model(path).path == path


def test_a_directory_is_served_under_the_name_that_a_person_gave_it(model_path: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--my-org--My-Model--v2" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    model_path.rename(snapshot)
    link = tmp_path / "my-model"
    link.symlink_to(snapshot)
    assert open_checkpoint(snapshot).served_name == "my-org/My-Model--v2"
    assert open_checkpoint(link).served_name == "my-model"
    blob = write_tiny_gguf(link, tmp_path / "0123456789abcdef")
    named = tmp_path / "Tiny.Q4_0.gguf"
    named.symlink_to(blob)
    assert open_checkpoint(named).served_name == "Tiny.Q4_0"
