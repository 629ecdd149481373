"""Opening Hugging Face directories."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from common.checkpoint import CheckpointError, open_checkpoint
from common.checkpoint.safetensors_files import weight_files
from tests.tiny_model import CHAT_TEMPLATE, TinyModel, write_tiny_model


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_directory_tells_its_shape_tokens_and_template(model_path: Path) -> None:
    checkpoint = open_checkpoint(model_path)
    assert checkpoint.config.num_layers == 2
    assert checkpoint.config.num_kv_heads == 2
    assert checkpoint.config.head_dim == 16
    assert (checkpoint.bos_token, checkpoint.bos_token_id) == ("<s>", 0)
    assert (checkpoint.eos_token, checkpoint.eos_token_ids) == ("</s>", (1,))
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.served_name == "tiny"


def test_the_tokenizer_is_one_object_and_round_trips_any_text(model_path: Path) -> None:
    checkpoint = open_checkpoint(model_path)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is checkpoint.tokenizer()
    text = "the 한😀é\n\tand 123"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_truncation_and_padding_of_a_file_are_not_taken_over(model_path: Path) -> None:
    text = "the 123 and the 456"
    expected = open_checkpoint(model_path).tokenizer().encode(text).ids
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(model_path / "tokenizer.json"))
    assert open_checkpoint(model_path).tokenizer().encode(text).ids == expected


def test_every_eos_id_is_collected_with_the_tokenizers_own_first(model_path: Path) -> None:
    edit(model_path / "generation_config.json", eos_token_id=[2, 1, 7])
    assert open_checkpoint(model_path).eos_token_ids == (1, 2, 7)


def test_an_eos_beyond_the_vocabulary_is_none(model_path: Path) -> None:
    """It is never drawn, and nothing may look for its logit."""
    vocab_size = open_checkpoint(model_path).config.vocab_size
    edit(model_path / "generation_config.json", eos_token_id=[2, vocab_size - 1, vocab_size, 10**9])
    assert open_checkpoint(model_path).eos_token_ids == (1, 2, vocab_size - 1)


def test_eos_falls_back_to_the_model_config(model_path: Path) -> None:
    (model_path / "generation_config.json").unlink()
    (model_path / "tokenizer_config.json").unlink()
    edit(model_path / "config.json", eos_token_id=9)
    checkpoint = open_checkpoint(model_path)
    assert checkpoint.eos_token is None
    assert checkpoint.eos_token_ids == (9,)


def test_generation_defaults_hold_sampling_fields_only(model_path: Path) -> None:
    edit(model_path / "generation_config.json", temperature=0.6, max_new_tokens=9, top_k=None, do_sample=True)
    assert open_checkpoint(model_path).generation_defaults == {"temperature": 0.6, "max_new_tokens": 9}


def test_special_tokens_may_be_written_as_objects(model_path: Path) -> None:
    edit(model_path / "tokenizer_config.json", bos_token={"content": "<s>", "lstrip": False})
    assert open_checkpoint(model_path).bos_token_id == 0


@pytest.mark.parametrize(
    "template", ["T", [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]]
)
def test_the_template_may_lie_in_the_tokenizer_config(model_path: Path, template: Any) -> None:
    (model_path / "chat_template.jinja").unlink()
    edit(model_path / "tokenizer_config.json", chat_template=template)
    assert open_checkpoint(model_path).chat_template == "T"


def test_a_model_without_template_says_so(model_path: Path) -> None:
    (model_path / "chat_template.jinja").unlink()
    assert open_checkpoint(model_path).chat_template is None


def test_equal_models_have_equal_digests_wherever_they_lie(tmp_path: Path) -> None:
    first, second = (open_checkpoint(write_tiny_model(tmp_path / name)) for name in "ab")
    assert first.digest == second.digest
    assert first.tokenizer_digest == second.tokenizer_digest


@pytest.mark.parametrize("change", ["weights", "config"])
def test_another_model_has_another_digest(tmp_path: Path, change: str) -> None:
    first = open_checkpoint(write_tiny_model(tmp_path / "a"))
    other = write_tiny_model(tmp_path / "b", TinyModel(seed=1) if change == "weights" else None)
    if change == "config":
        edit(other / "config.json", rope_theta=20000.0)
    assert open_checkpoint(other).digest != first.digest
    assert open_checkpoint(other).tokenizer_digest == first.tokenizer_digest


def test_sharded_weights_are_found_through_the_index(model_path: Path) -> None:
    tensors = load_file(model_path / "model.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, model_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (model_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert [file.name for file in weight_files(model_path)] == sorted(shards)
    (model_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        open_checkpoint(model_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(model_path: Path, name: str) -> None:
    (model_path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(model_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_config_is_named(model_path: Path, text: str) -> None:
    (model_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(model_path)


def test_a_directory_without_a_model_says_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^cannot read .*config\.json: No such file"):
        open_checkpoint(tmp_path)


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="neither a directory nor a GGUF file"):
        open_checkpoint(tmp_path / "file")


def test_reading_metadata_imports_no_torch() -> None:
    code = "import sys, common.checkpoint, common.checkpoint.demo_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
