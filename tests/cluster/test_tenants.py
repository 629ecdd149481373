"""Tenants on one real cluster: no prefix is shared, keys come and go while it runs, and no key is there to be read."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from common.wire.grpc_options import channel_options
from common.wire.pb import generation_pb2 as pb
from common.wire.pb import generation_pb2_grpc
from deploy.cli.keys import hash_line, new_key
from tests.cluster.cluster import Cluster, running_cluster

PROMPT = [5 + idx % 90 for idx in range(64)]
NUM_PROMPTS = 10
ADMIN = "admin-" + "a" * 40
A, B, A2, C, D = (new_key() for _ in range(5))


def written(folder: Path, *, with_second_key: bool = False) -> Path:
    keys = "".join(f", {hash_line(A2)}" if with_second_key else "")
    path = folder / "keys.yaml"
    path.write_text(
        f"cache_salt_secret: {'ab' * 32}\n"
        "tenants:\n"
        f"  a: {{keys: [{hash_line(A)}{keys}]}}\n"
        f"  b: {{keys: [{hash_line(B)}]}}\n"
        f"  c: {{keys: [{hash_line(C)}], cache_group: together}}\n"
        f"  d: {{keys: [{hash_line(D)}], cache_group: together}}\n"
    )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    written(folder)
    (folder / "admin").write_text(f"{ADMIN}\n")
    return folder


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, folder: Path) -> Iterator[Cluster]:
    router = {"api_keys_file": str(folder / "keys.yaml"), "admin_key_file": str(folder / "admin")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_ROUTER_ADMIN_KEY", ADMIN)  # for the test's own calls; the cluster reads its file
        with running_cluster(tiny_model, "--local-prefill-max-tokens", "0", config={"router": router}) as started:
            yield started


def ask(cluster: Cluster, key: str, prompt: list[int], **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **body}
    return httpx.post(f"{cluster.url}/v1/completions", json=asked, headers=headers, timeout=60)


def num_cached(cluster: Cluster, key: str, prompt: list[int]) -> int:
    reply = ask(cluster, key, prompt)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    assert reply.headers["x-pdserve-cached-tokens"] == str(usage["prompt_tokens_details"]["cached_tokens"])
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def find(cluster: Cluster, key: str, prompt: list[int]) -> None:
    """The tenant finds its own blocks, at once or, on a busy machine, at one of its next requests."""
    deadline_s = time.monotonic() + 60
    while num_cached(cluster, key, prompt) != 48:
        assert time.monotonic() < deadline_s


def test_a_prefix_of_one_tenant_is_never_found_by_another(cluster: Cluster) -> None:
    """Each prompt is cold for whoever asks it first, however warm it is for the other; then each finds its own."""
    for idx in range(NUM_PROMPTS):
        prompt = [4, 5 + idx, *PROMPT[2:]]
        owner, other = (A, B) if idx % 2 else (B, A)
        assert num_cached(cluster, owner, prompt) == 0
        find(cluster, owner, prompt)
        assert num_cached(cluster, other, prompt) == 0
        find(cluster, other, prompt)
        find(cluster, owner, prompt)


def test_both_tenants_get_the_same_text(cluster: Cluster) -> None:
    texts = {ask(cluster, key, PROMPT, max_tokens=12).json()["choices"][0]["text"] for key in (A, B, A, B)}
    assert len(texts) == 1


def test_tenants_of_one_group_share(cluster: Cluster) -> None:
    prompt = [7, *PROMPT[1:]]
    assert num_cached(cluster, C, prompt) == 0
    find(cluster, D, prompt)
    assert num_cached(cluster, B, prompt) == 0


def test_over_grpc_a_tenant_finds_its_own_prefix_and_no_others(cluster: Cluster) -> None:
    prompt = [8, *PROMPT[1:]]
    assert num_cached(cluster, A, prompt) == 0
    find(cluster, A, prompt)
    with grpc.insecure_channel(cluster.grpc, options=channel_options()) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), stop=pb.StopConditions(max_tokens=2))
        cached = []
        for key in (A, B):
            answers = list(stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=60))
            cached.append(answers[-1].finished.usage.cached_tokens)
    assert cached == [48, 0]


@pytest.mark.parametrize("salt", ["a", "tenant-a", "ab" * 32])
def test_no_client_can_salt_itself_into_another_tenants_cache(cluster: Cluster, salt: str) -> None:
    reply = ask(cluster, B, PROMPT, cache_salt=salt)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")


def test_a_key_is_added_and_withdrawn_while_it_runs(cluster: Cluster, folder: Path) -> None:
    def status(key: str) -> int:
        return ask(cluster, key, PROMPT).status_code

    def becomes(key: str, expected: int) -> bool:
        deadline_s = time.monotonic() + 60
        while status(key) != expected and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return status(key) == expected

    assert status(A2) == 401
    written(folder, with_second_key=True)
    assert becomes(A2, 200)
    assert status(A) == 200
    written(folder)
    assert becomes(A2, 401)
    assert status(A) == 200


def test_administration_is_for_the_admin_key_alone(cluster: Cluster) -> None:
    for path in ("/admin/v1/state", "/admin/v1/requests", "/metrics", "/load"):
        for headers in ({}, {"authorization": f"Bearer {A}"}, {"x-admin-key": A}):
            assert httpx.get(f"{cluster.url}{path}", headers=headers, timeout=60).status_code == 401
        assert httpx.get(f"{cluster.url}{path}", headers={"x-admin-key": ADMIN}, timeout=60).status_code == 200
    health = httpx.get(f"{cluster.url}/health", timeout=60)
    assert (health.status_code, set(health.json())) == (200, {"status"})


def test_generate_takes_its_key_from_the_environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = cluster.cli("generate", "the", "--max-tokens", "2")
    assert refused.returncode == 1
    assert "PDSERVE_API_KEY" in refused.stderr
    monkeypatch.setenv("PDSERVE_API_KEY", A)
    assert cluster.cli("generate", "the", "--max-tokens", "2").returncode == 0


def test_no_key_is_in_an_argument_an_environment_a_log_or_a_metric(cluster: Cluster) -> None:
    secrets = [key.encode() for key in (A, B, C, D, A2, ADMIN)] + [b"ab" * 32]
    root = psutil.Process(cluster.process.pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            text = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            text += _without_our_own(Path(f"/proc/{process.pid}/environ").read_bytes())
            assert not [secret for secret in secrets if secret in text], process.pid
    metrics = httpx.get(f"{cluster.url}/metrics", headers={"x-admin-key": ADMIN}, timeout=60).content
    records = httpx.get(f"{cluster.url}/admin/v1/requests", headers={"x-admin-key": ADMIN}, timeout=60).content
    for content in (metrics, records, cluster.logs().encode()):
        assert not [secret for secret in secrets if secret in content]
    assert os.environ["PDSERVE_ROUTER_ADMIN_KEY"] == ADMIN


def _without_our_own(environ: bytes) -> bytes:
    """What the test itself put there, for its own calls, its children inherit."""
    return b"\0".join(line for line in environ.split(b"\0") if not line.startswith(b"PDSERVE_ROUTER_ADMIN_KEY="))
