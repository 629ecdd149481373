"""Small directories, each read as transformers reads it, or refused in words that name the file or field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import CheckpointError, open_checkpoint
from common.checkpoint.hf_config import parse_config
from common.checkpoint.hf_rope import read_rope
from common.engine.model.weights import load_tensors
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import PromptTokenizer
from tests.texts import CORPUS
from tests.tiny_model import CLASSES, TinyModel, write_tiny_model

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 1024,
}
SCALED = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
OLD_NAME = {"type": "llama3"} | {name: value for name, value in LLAMA3.items() if name != "rope_type"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}
HEADS = {"num_attention_heads": 32, "hidden_size": 512, "num_key_value_heads": 8, "head_dim": 16}


def edit(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    fields = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if name not in drop}))


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def _rope_of(config: Any) -> tuple[float, dict[str, Any] | None]:
    config.standardize_rope_params()  # as its model does before it computes
    rope = dict(config.rope_parameters)
    scaling = {name: rope[name] for name in LLAMA3 if name != "rope_type"} if rope["rope_type"] == "llama3" else None
    return rope["rope_theta"], scaling


CONFIGS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "as written": ("llama", (), {}),
    "no theta": ("llama", ("rope_theta",), {}),
    "theta in rope_parameters": ("llama", (), {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "theta in both": ("llama", (), {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}}),
    "theta beside rope_parameters": ("llama", (), {"rope_theta": 5e5, "rope_parameters": LLAMA3}),
    "theta beside rope_scaling": ("llama", (), {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "theta in rope_scaling": ("llama", ("rope_theta",), {"rope_scaling": LLAMA3 | {"rope_theta": 5e5}}),
    "both places": ("llama", (), {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 3.0}}),
    "empty rope_scaling": ("llama", (), {"rope_scaling": {}, "rope_parameters": {"rope_theta": 3.0}}),
    "null rope": ("llama", (), {"rope_scaling": None, "rope_parameters": None}),
    "the old name of the type": ("llama", (), {"rope_scaling": OLD_NAME}),
    "original length beside": ("llama", (), {"rope_scaling": SCALED, "original_max_position_embeddings": 512}),
    "original length in both": ("llama", (), {"rope_scaling": LLAMA3, "original_max_position_embeddings": 512}),
    "original length nowhere": ("llama", (), {"rope_scaling": SCALED}),
    "no kv heads": ("llama", ("num_key_value_heads",), {}),
    "null kv heads": ("llama", (), {"num_key_value_heads": None}),
    "no head_dim": ("llama", ("head_dim",), {}),
    "null head_dim": ("llama", (), {"head_dim": None}),
    "no epsilon": ("llama", ("rms_norm_eps",), {}),
    "no tie": ("llama", ("tie_word_embeddings",), {}),
    "mistral": ("mistral", (), {}),
    "mistral without kv heads": ("mistral", ("num_key_value_heads",), HEADS),
    "mistral without a window": ("mistral", (), {"sliding_window": None}),
    "mistral with the default window": ("mistral", (), {"max_position_embeddings": 32768}),
    "qwen2 without kv heads": ("qwen2", ("num_key_value_heads",), HEADS),
    "qwen3 without head_dim": ("qwen3", ("head_dim",), {}),
    "qwen3 with windows": ("qwen3", (), {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_means_what_transformers_makes_of_it(model_path: Path, name: str) -> None:
    family, drop, changes = CONFIGS[name]
    path = model_path / "config.json"
    edit(path, drop, **{"model_type": family, "architectures": [f"{CLASSES[family]}ForCausalLM"]} | changes)
    spec, theirs = parse_config(json.loads(path.read_text())), transformers.AutoConfig.from_pretrained(model_path)
    theta, scaling = _rope_of(theirs)
    assert spec.rope_theta == theta
    assert (spec.rope_scaling is None) == (scaling is None)
    if spec.rope_scaling is not None and scaling is not None:
        ours = spec.rope_scaling
        assert [ours.factor, ours.low_freq_factor, ours.high_freq_factor, ours.original_max_position] == [
            *scaling.values()
        ]
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (spec.rms_norm_eps, spec.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert spec.windows == _windows_of(theirs)


# What a configuration must state.
STATED = {
    **{"num_hidden_layers": 3, "num_attention_heads": 32, "hidden_size": 512, "intermediate_size": 96},
    **{"vocab_size": 100, "max_position_embeddings": 131072, "pad_token_id": 0},
}
STATED_OF = {"deepseek_v2": {"num_experts_per_tok": 6}, "deepseek_v3": {"num_key_value_heads": 32}}
# Ours -> where transformers has it, for those that have it.
EXPERT_COUNTS = {
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "num_active": ("num_experts_per_tok",),
    "is_normalized": ("norm_topk_prob",),
    "num_groups": ("n_group",),
    "num_active_groups": ("topk_group",),
    "scale": ("routed_scaling_factor",),
}


@pytest.mark.parametrize("family", CLASSES)
def test_fields_that_are_absent_are_those_that_transformers_takes(tmp_path: Path, family: str) -> None:
    kind = "gemma3_text" if family == "gemma3" else family
    config = (
        STATED | STATED_OF.get(family, {}) | {"model_type": kind, "architectures": [f"{CLASSES[family]}ForCausalLM"]}
    )
    edit(tmp_path / "config.json", **config)
    spec, theirs = parse_config(config), transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.standardize_rope_params()
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    found = read_rope({"rope_parameters": rope, "max_position_embeddings": spec.max_position}, head_dim=spec.head_dim)
    assert (spec.rope_theta, spec.rope_scaling, spec.rotary_size) == (found.theta, found.scaling, found.size)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (spec.num_kv_heads, spec.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert (spec.rms_norm_eps, spec.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    windows = _windows_of(theirs)
    assert spec.windows == (windows if any(windows) else ())
    for name in ("attention_bias", "mlp_bias"):
        assert getattr(spec, name) == getattr(theirs, name, False)
    for ours, names in EXPERT_COUNTS.items() if spec.experts is not None else ():
        stated = [getattr(theirs, name) for name in names if hasattr(theirs, name)]
        assert all(getattr(spec.experts.routing, ours) == each for each in stated if each is not None)
    if (latent := spec.latent) is not None:
        assert (latent.rank, latent.query_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank)
        assert (latent.key_size, latent.value_size) == (theirs.qk_nope_head_dim, theirs.v_head_dim)
        assert spec.dense_layers == frozenset(range(theirs.first_k_dense_replace))


def _windows_of(config: Any) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": None}, "rope_theta should be a positive number, got None"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta should be a positive number, got None"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor should be a positive number, got None"),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "factor should be a positive number, got None",
        ),
        ({"rope_scaling": {"rope_type": "xpos", "factor": 2.0}}, "rope type 'xpos' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type is not supported"),
        ({"rope_scaling": "llama3"}, "rope_parameters='llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"num_hidden_layers": None}, "num_hidden_layers should be a positive integer, got None"),
        ({"hidden_size": True}, "hidden_size should be a positive integer, got True"),
        ({"head_dim": "16"}, "head_dim should be a positive integer, got '16'"),
        ({"rms_norm_eps": None}, "rms_norm_eps should be a number, got None"),
        ({"architectures": "LlamaForCausalLM"}, "architecture None is not one of"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        (GEMMA3 | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar should be a positive number, got None"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern should be a positive integer, got 0"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        (GEMMA3 | {"rope_scaling": {"rope_type": "xpos", "factor": 8.0}}, "rope type 'xpos' is not supported"),
    ],
)
def test_a_field_that_is_null_missing_or_unsupported_is_named(
    model_path: Path, changes: dict[str, Any], words: str
) -> None:
    edit(model_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(model_path)


def _shard(path: Path, *, stale: bool) -> None:
    """Two files and an index; with `stale`, the second also holds an old copy of what the index finds in the first."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    first, second = names[:7], names[7:]
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    left_over = {name: tensors[name] + 1 for name in first} | {"of.another.model": torch.ones(3)} if stale else {}
    save_file({name: tensors[name] for name in first}, path / "a.safetensors", metadata={"format": "pt"})
    save_file({name: tensors[name] for name in second} | left_over, path / "b.safetensors", metadata={"format": "pt"})
    edit(path / "model.safetensors.index.json", weight_map=weight_map, metadata={})


def _other_head(path: Path) -> None:
    edit(path / "config.json", tie_word_embeddings=True)


def _same_head(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit(path / "config.json", tie_word_embeddings=True)


def _no_head(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit(path / "config.json", tie_word_embeddings=True)


WEIGHTS: dict[str, Callable[[Path], None]] = {
    "two files": lambda path: _shard(path, stale=False),
    "tied, beside another head": _other_head,
    "tied, beside a copy": _same_head,
    "tied, without a head": _no_head,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_each_weight_is_the_one_that_transformers_loads(model_path: Path, name: str) -> None:
    WEIGHTS[name](model_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(model_path)
    ours = dict(load_tensors(checkpoint, torch.float32))
    if checkpoint.config.tie_embeddings:
        ours["lm_head.weight"] = ours["model.embed_tokens.weight"]
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[each], theirs[each]) for each in theirs)


def test_the_index_decides_which_copy_of_a_weight_is_read(model_path: Path) -> None:
    """transformers itself takes the copy in the file that it reads last."""
    meant = load_file(model_path / "model.safetensors")
    _shard(model_path, stale=True)
    read = dict(load_tensors(open_checkpoint(model_path), torch.float32))
    assert set(read) == set(meant)
    assert all(torch.equal(read[name], meant[name]) for name in meant)


def test_a_tied_copy_of_the_embeddings_is_not_kept_twice(model_path: Path) -> None:
    _same_head(model_path)
    assert "lm_head.weight" not in open_checkpoint(model_path).tensors


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
OBJECTS = {name: {"__type": "AddedToken", "content": text, "special": True} for name, text in SPECIAL.items()}
DECODER = {str(idx): {"content": text, "special": True} for idx, text in enumerate(SPECIAL.values())}


def _without(path: Path, *names: str) -> None:
    for name in names:
        (path / name).unlink()


def _only_the_map(path: Path) -> None:
    _without(path, "tokenizer_config.json")
    edit(path / "special_tokens_map.json", **OBJECTS | {"unk_token": "<pad>"})


def _map_and_config(path: Path) -> None:
    edit(path / "tokenizer_config.json", bos_token="<pad>", mask_token="the")
    edit(path / "special_tokens_map.json", bos_token="<s>", sep_token="and")


def _map_that_does_not_count(path: Path) -> None:
    edit(path / "tokenizer_config.json", added_tokens_decoder=DECODER)
    edit(path / "special_tokens_map.json", bos_token="<pad>", unk_token="<pad>")


def _added_beyond(path: Path) -> None:
    size = TinyModel().vocab_size
    edit(path / "tokenizer_config.json", added_tokens_decoder=DECODER | {str(size): {"content": "<tool>"}})


def _with(path: Path, **changes: Any) -> None:
    edit(path / "tokenizer_config.json", **changes)


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "as written": lambda path: None,
    "no configuration": lambda path: _without(path, "tokenizer_config.json"),
    "only special_tokens_map.json": _only_the_map,
    "the map over the configuration": _map_and_config,
    "the map beside listed tokens": _map_that_does_not_count,
    "a listed token that tokenizer.json lacks": _added_beyond,
    "objects": lambda path: _with(path, **OBJECTS),
    "BOS by tokenizer.json alone": lambda path: _with(path, add_bos_token=False),
    "BOS and EOS": lambda path: _with(path, add_bos_token=True, add_eos_token=True),
    "EOS": lambda path: _with(path, add_eos_token=True),
    "null": lambda path: _with(path, bos_token=None),
    "a word made special": lambda path: _with(path, eos_token="ing"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_becomes_the_ids_that_transformers_gives(model_path: Path, name: str) -> None:
    TOKENIZERS[name](model_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(model_path)
    ours = open_checkpoint(model_path).tokenizer()
    for text in CORPUS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], repr(text)
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"]


TEMPLATE = "".join(
    f"{{{{ {name} is defined }}}}{{{{ {name} }}}};"
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "mask_token", "cls_token")
)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_template_sees_the_special_tokens_that_transformers_gives_it(model_path: Path, name: str) -> None:
    TOKENIZERS[name](model_path)
    (model_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(model_path)
    checkpoint = open_checkpoint(model_path)
    assert checkpoint.chat_template is not None
    template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)
    ours = template.render([{"role": "user", "content": "a"}], add_generation_prompt=True, kwargs={})
    assert ours == theirs.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


def test_a_whole_prompt_is_encoded_as_transformers_encodes_it(model_path: Path) -> None:
    theirs, ours = (
        transformers.PreTrainedTokenizerFast.from_pretrained(model_path),
        PromptTokenizer.of(open_checkpoint(model_path)),
    )
    for text in CORPUS:
        if not text.startswith("<s>"):  # a BOS that a prompt writes itself is not doubled
            assert ours.encode(text) == theirs(text)["input_ids"]
