from pathlib import Path

import pytest

from common.values.config import ClusterConfig, PoolSettings, WorkerSettings
from common.values.messages import Role
from deploy.worker.env import gpu_names, gpu_of, num_threads_per_worker, worker_environment, worker_settings


def test_workers_get_equal_shares_of_the_cores_and_never_none() -> None:
    def shares(prefill: int, decode: int, cores: int) -> int:
        return num_threads_per_worker(ClusterConfig(pools=PoolSettings(prefill=prefill, decode=decode)), cores)

    assert [shares(1, 1, 2), shares(1, 1, 16), shares(2, 2, 16), shares(4, 4, 2), shares(0, 0, 8)] == [1, 8, 4, 1, 8]


def test_a_configured_thread_count_is_kept() -> None:
    config = ClusterConfig(decode_worker=WorkerSettings(num_threads=3))
    assert worker_settings(config, Role.DECODE, 1).num_threads == 3
    assert worker_settings(config, Role.PREFILL, 1).num_threads == 1


def test_threads_that_wait_sleep_and_gloo_stays_on_loopback() -> None:
    env = worker_environment(WorkerSettings(num_threads=2), has_gpu=False)
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["GLOO_SOCKET_IFNAME"]) == ("2", "PASSIVE", "lo")
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(WorkerSettings(host="10.0.0.1"), has_gpu=False)


def test_kernels_are_interpreted_only_where_there_is_no_gpu() -> None:
    triton = WorkerSettings(attention="triton")
    assert worker_environment(triton, has_gpu=False)["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in worker_environment(triton, has_gpu=True)
    assert "TRITON_INTERPRET" not in worker_environment(WorkerSettings(), has_gpu=False)


def test_beside_a_gpu_a_dead_peer_of_nccl_ends_no_process_and_an_operators_tuning_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "16")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    env = worker_environment(WorkerSettings(), has_gpu=True)
    assert (env["TORCH_NCCL_ASYNC_ERROR_HANDLING"], env["TORCH_NCCL_ENABLE_MONITORING"]) == ("0", "0")
    assert (env["NCCL_MAX_P2P_NCHANNELS"], env["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("16", "32")
    assert not any("NCCL_A" in name for name in worker_environment(WorkerSettings(), has_gpu=False))


def test_the_gpus_of_a_machine_are_those_that_are_shown_or_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names(tmp_path) == ["0", "1", "2"], "CUDA counts what the container was given"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8c")
    assert gpu_names(tmp_path) == ["3", "GPU-8c"]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpu_names(tmp_path) == []


def test_workers_of_one_machine_take_its_gpus_in_turn_and_a_replacement_the_same() -> None:
    config = ClusterConfig(pools=PoolSettings(prefill=2, decode=6))
    gpus = [str(idx) for idx in range(8)]
    names = [*(("prefill", idx) for idx in range(2)), *(("decode", idx) for idx in range(6))]
    given = [gpu_of(config, Role(role), f"{role}-{idx}", gpus) for role, idx in names]
    assert given == gpus
    assert gpu_of(config, Role.DECODE, "decode-0", ["0"]) == "0"
    assert gpu_of(config, Role.DECODE, "decode-0", []) is None
    assert gpu_of(config, Role.DECODE, "mine", gpus) is None
