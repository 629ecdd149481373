"""From configuration to a loaded model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.checkpoint import CheckpointError, open_checkpoint
from common.engine.devices.cpu.device import CpuDevice, cpu_dtype
from common.engine.devices.cpu.native.ops import native_ops
from common.engine.devices.hidden_gpu import refuse_hidden_gpu
from common.engine.loading import LoadedModel, fingerprint_of, kv_spec_of, load_model, open_device, refit
from common.values.config import CPU_CACHE_BYTES, ModelConfig, WorkerConfig
from tests.interpreter import import_triton_interpreted
from tests.tiny_model import TinyModel, write_tiny_model

import_triton_interpreted()

from common.engine.devices.triton.device import TritonDevice  # noqa: E402


def load(path: Path, model: dict[str, Any] | None = None, **fields: Any) -> LoadedModel:
    model_config = ModelConfig(path=str(path), **(model or {}))
    return load_model(WorkerConfig(role="prefill", worker_id="p", model=model_config, **fields))


def test_the_cache_takes_as_many_blocks_as_its_bytes_hold(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m")
    loaded = load(path, dtype="float32", kv_cache_bytes=1 << 20, block_size=32)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 32
    assert loaded.cache.num_blocks == ((1 << 20) // block_bytes,)
    assert loaded.cache.nbytes <= 1 << 20
    assert load(path, num_blocks=7).cache.num_blocks == (7,)


def test_a_role_that_states_no_cache_has_the_default_one_whatever_the_other_stated(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m")
    small = load(path, kv_cache_bytes=1 << 20)
    config = WorkerConfig(role="decode", worker_id="p", model=ModelConfig(path=str(path)), block_size=32)
    again = refit(small, config)
    assert again.cache.nbytes == CPU_CACHE_BYTES


@pytest.mark.parametrize(
    ("configured", "num_blocks", "expected"), [(0, 1000, 2048), (512, 1000, 512), (9999, 1000, 2048), (0, 10, 160)]
)
def test_sequences_are_bounded_by_wish_model_and_cache(
    tmp_path: Path, configured: int, num_blocks: int, expected: int
) -> None:
    path = write_tiny_model(tmp_path / "m")
    assert load(path, {"max_model_len": configured}, num_blocks=num_blocks).max_model_len == expected


def test_the_served_name_is_the_configured_one_or_the_directorys(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "my-model")
    assert load(path, num_blocks=2).served_name == "my-model"
    assert load(path, {"served_name": "other"}, num_blocks=2).served_name == "other"


def test_weights_and_cache_have_the_chosen_dtype(tmp_path: Path) -> None:
    loaded = load(write_tiny_model(tmp_path / "m"), dtype="bfloat16", num_blocks=2)
    assert loaded.device.dtype == loaded.cache.planes[0][0].dtype == torch.bfloat16
    assert ("dtype", "bfloat16") in loaded.fingerprint.fields


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)])
def test_a_quantized_cache_holds_more_tokens_in_the_same_memory(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(head_dim=64))
    plain, quantized = (
        load(path, dtype="bfloat16", kv_cache_bytes=1 << 20, kv_cache_dtype=kind) for kind in ("auto", name)
    )
    assert quantized.cache.planes[0][0].dtype == dtype
    assert quantized.cache.nbytes <= 1 << 20
    assert quantized.cache.num_blocks[0] > 1.75 * plain.cache.num_blocks[0]
    type_name = str(dtype).removeprefix("torch.")
    planes = f"k 2x64 {type_name}, v 2x64 {type_name}, k_scale 2 float32, v_scale 2 float32"
    assert ("kv_cache", f"layers 0-1: {planes}") in quantized.fingerprint.fields


def test_auto_is_bfloat16_exactly_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, expected in [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
    ]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert cpu_dtype("auto") == expected
        assert cpu_dtype("float32") == torch.float32


def test_the_device_is_a_gpu_where_there_is_one_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(attention: str, *, has_gpu: bool) -> tuple[type, str, torch.dtype]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
        config = WorkerConfig(role="prefill", worker_id="p", model=ModelConfig(path="m"), attention=attention)
        device = open_device(config)
        return type(device), device.place.type, device.dtype

    assert opened("auto", has_gpu=True) == opened("triton", has_gpu=True) == (TritonDevice, "cuda", torch.bfloat16)
    assert opened("auto", has_gpu=False) == (CpuDevice, "cpu", torch.float32)
    assert opened("cpu", has_gpu=True) == (CpuDevice, "cpu", torch.float32)
    assert opened("triton", has_gpu=False) == (TritonDevice, "cpu", torch.float32)  # under the interpreter


def test_a_gpu_that_torch_does_not_see_is_refused_unless_it_is_hidden_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    refuse_hidden_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    with pytest.raises(CheckpointError, match="set attention: cpu to serve from the CPU"):
        refuse_hidden_gpu(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_hidden_gpu(tmp_path)


def test_only_where_the_device_is_left_open_a_hidden_gpu_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise CheckpointError("hidden")

    monkeypatch.setattr("common.engine.loading.refuse_hidden_gpu", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = WorkerConfig(role="prefill", worker_id="p", model=ModelConfig(path="m"), attention="cpu")
    assert open_device(config).place.type == "cpu"
    with pytest.raises(CheckpointError, match="hidden"):
        open_device(config.model_copy(update={"attention": "auto"}))


def test_triton_refuses_weights_of_fewer_bits_by_name() -> None:
    with pytest.raises(CheckpointError, match="quantization=int8 is not offered by attention=triton"):
        TritonDevice(torch.bfloat16, "int8")


def test_copies_of_a_model_pair_and_every_difference_is_named(tmp_path: Path) -> None:
    def fingerprint(name: str, model: TinyModel, *dtypes: torch.dtype) -> Any:
        of_model, of_cache = dtypes or (torch.float32, torch.float32)
        checkpoint = open_checkpoint(write_tiny_model(tmp_path / name, model))
        return fingerprint_of(checkpoint, of_model, kv_spec_of(checkpoint.config, of_cache, 16))

    base = fingerprint("a", TinyModel())
    assert base.mismatches(fingerprint("b", TinyModel())) == []
    changed = fingerprint("c", TinyModel(), torch.bfloat16, torch.float32)
    assert [mismatch.split(":")[0] for mismatch in base.mismatches(changed)] == ["dtype"]
    changed = fingerprint("f", TinyModel(), torch.float32, torch.int8)
    assert [mismatch.split(":")[0] for mismatch in base.mismatches(changed)] == ["kv_cache"]
    names = [mismatch.split(":")[0] for mismatch in base.mismatches(fingerprint("d", TinyModel(num_kv_heads=4)))]
    assert names == ["kv_cache", "model"]
    assert base.mismatches(fingerprint("e", TinyModel(seed=1))) != []


def test_the_log_says_how_many_layers_are_computed_in_compiled_calls_and_what_was_dequantized(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", TinyModel(architecture="olmo2"))  # never compiled: it has no pre-norms
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config))
    with capture_logs() as logs:
        load(path, num_blocks=2, dtype="float32")
    said = {entry["event"]: entry for entry in logs}
    assert (said["layers_prepared"]["num_layers"], said["layers_prepared"]["num_compiled"]) == (2, 0)
    assert said["weights_are_dequantized"]["stored_as"] == "fp8, 8 bits"
    assert said["weights_are_dequantized"]["dtype"] == "float32"


def test_workers_that_took_different_factors_of_longrope_do_not_pair(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m")
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = json.loads((path / "config.json").read_text())
    config["rope_scaling"] = scaling | {"original_max_position_embeddings": 32}
    (path / "config.json").write_text(json.dumps(config))

    def fingerprint(max_model_len: int) -> Any:
        return load(path, {"max_model_len": max_model_len}, num_blocks=2).fingerprint

    assert [one.split(":")[0] for one in fingerprint(32).mismatches(fingerprint(33))] == ["rope_scaling"]
    assert fingerprint(33).mismatches(fingerprint(64)) == []


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        load(tmp_path / "absent")


def test_weights_of_fewer_bits_pair_with_their_like_only(tmp_path: Path) -> None:
    ops = native_ops()
    if ops is None or ops.products is None:
        pytest.skip("no C++ compiler, or no AVX512-BF16")
    path = write_tiny_model(tmp_path / "m")
    plain, fewer = (load(path, dtype="bfloat16", num_blocks=2, quantization=kind) for kind in ("none", "int8"))
    assert [one.split(":")[0] for one in plain.fingerprint.mismatches(fewer.fingerprint)] == ["quantization"]
    with pytest.raises(CheckpointError, match="needs bfloat16"):
        load(path, dtype="float32", num_blocks=2, quantization="int8")
