"""Opening GGUF files: header, shape, tokenizer."""

import struct
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer

from common.checkpoint import CheckpointError, open_checkpoint
from common.checkpoint.gguf_metadata import read_gguf_header
from common.checkpoint.gguf_tokenizer import build_tokenizer
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_model import CHAT_TEMPLATE, TinyModel, write_tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "hf")


@pytest.fixture
def gguf_path(directory: Path, tmp_path: Path) -> Path:
    return write_tiny_gguf(directory, tmp_path / "tiny.gguf")


def test_the_header_is_what_the_gguf_library_reads(gguf_path: Path) -> None:
    header = read_gguf_header(gguf_path)
    reader = gguf.GGUFReader(gguf_path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == expected
    assert {name: (tensor.offset, tensor.type_id) for name, tensor in header.tensors.items()} == {
        tensor.name: (tensor.data_offset, tensor.tensor_type) for tensor in reader.tensors
    }


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "olmo2"])
def test_a_converted_model_has_the_shape_of_its_source(tmp_path: Path, architecture: str) -> None:
    directory = write_tiny_model(tmp_path / "hf", TinyModel(architecture=architecture, tie_embeddings=True))
    checkpoint = open_checkpoint(write_tiny_gguf(directory, tmp_path / "m.gguf"))
    source = open_checkpoint(directory).config
    assert checkpoint.config.rms_norm_eps == pytest.approx(source.rms_norm_eps)
    assert replace(checkpoint.config, rms_norm_eps=0) == replace(source, rms_norm_eps=0)


def test_tokens_template_and_name_are_read(gguf_path: Path) -> None:
    checkpoint = open_checkpoint(gguf_path)
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<s>", "</s>")
    assert checkpoint.eos_token_ids == (1,)
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.served_name == "tiny"
    assert checkpoint.generation_defaults == {}


def test_text_is_cut_as_the_source_tokenizer_cuts_it_but_digits_stand_alone(directory: Path, gguf_path: Path) -> None:
    ours, source = open_checkpoint(gguf_path).tokenizer(), open_checkpoint(directory).tokenizer()
    text = "the sea and\n\nthe 한😀é </s> thing"
    assert ours.encode(text).ids == source.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode("a 12 b").ids) == "a 12 b"
    assert ours.encode("12").tokens == ["1", "2"]


def test_bos_is_prepended_only_where_the_file_says_so(directory: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(directory, tmp_path / "bos.gguf", tokenizer__ggml__add_bos_token=True)
    tokenizer = open_checkpoint(path).tokenizer()
    assert tokenizer.encode("a").ids[0] == 0
    assert 0 not in tokenizer.encode("a", add_special_tokens=False).ids


def split(pre: str, text: str) -> list[str]:
    """The pieces before BPE, for a vocabulary without merges."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.token_type": [1],
        "tokenizer.ggml.merges": [],
    }
    tokenizer: Tokenizer = build_tokenizer(metadata)
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


def test_each_pre_tokenizer_cuts_numbers_its_own_way() -> None:
    assert split("llama-bpe", "in 12345 we'll") == ["in", " ", "123", "45", " we", "'ll"]
    assert split("qwen2", "in 123 we'll") == ["in", " ", "1", "2", "3", " we", "'ll"]
    assert split("smollm", "in 123 we'll") == ["in", " ", "1", "2", "3", " we", "'ll"]


@pytest.mark.parametrize(("field", "value"), [("model", "bert"), ("pre", "unheard-of")])
def test_an_unknown_vocabulary_is_refused_by_name(field: str, value: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [], "tokenizer.ggml.merges": []}
    with pytest.raises(CheckpointError, match=value):
        build_tokenizer(metadata | {f"tokenizer.ggml.{field}": value})


def test_an_unknown_scaling_of_rope_is_refused(directory: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(directory, tmp_path / "scaled.gguf", llama__rope__scaling__type="unheard-of")
    with pytest.raises(CheckpointError, match="unheard-of"):
        open_checkpoint(path)


@pytest.mark.parametrize("kept_bytes", [4, 20, 40, 3000])
def test_a_file_that_was_cut_off_is_refused(gguf_path: Path, kept_bytes: int) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf.* cut off .*download it again"):
        open_checkpoint(gguf_path)


@pytest.mark.parametrize("offset", [8, 16, 24])
def test_absurd_counts_are_refused_before_memory_is_taken(gguf_path: Path, offset: int) -> None:
    data = bytearray(gguf_path.read_bytes())
    struct.pack_into("<Q", data, offset, 1 << 62)
    gguf_path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        open_checkpoint(gguf_path)


def test_another_version_is_refused(gguf_path: Path) -> None:
    data = bytearray(gguf_path.read_bytes())
    struct.pack_into("<I", data, 4, 9)
    gguf_path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="version 9"):
        open_checkpoint(gguf_path)


def test_quantization_changes_the_digest(directory: Path, gguf_path: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(directory, tmp_path / "q8.gguf", gguf.GGMLQuantizationType.Q8_0)
    assert open_checkpoint(other).digest != open_checkpoint(gguf_path).digest
    assert open_checkpoint(other).tokenizer_digest == open_checkpoint(gguf_path).tokenizer_digest
