"""Which certificate may call which method, over real gRPC on loopback (Q-03)."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from common.tls.admission import ADMITTED, RoleGuard, interceptors, roles_of
from common.tls.identity import Component, Identity, certificate_name
from common.values.config import TlsSettings
from common.wire.pb import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from deploy.cli import certs
from tests.certificates import NAMESPACE, new_certs, tls_settings

_LIMIT_S = 60.0


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers everything and counts; `Connect` yields its answers, as the real one, the first one unasked.

    So that a caller need not write before it reads: a write that meets the refusal of its call is INTERNAL to gRPC.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.ConnectResponse]:
        self.calls.append("worker")
        yield worker_pb2.ConnectResponse()
        async for _ in request_iterator:
            yield worker_pb2.ConnectResponse()

    async def Audit(self, request: Any, context: Any) -> worker_pb2.AuditResponse:
        self.calls.append("audit")
        return worker_pb2.AuditResponse()


class Handoff(handoff_pb2_grpc.HandoffServiceServicer):
    """As the real one: a coroutine that writes its answers."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        self.calls.append("handoff")
        await context.write(handoff_pb2.ConnectResponse())
        async for _ in request_iterator:
            await context.write(handoff_pb2.ConnectResponse())


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_certs(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def serving(tls: TlsSettings | None, component: str = "decode") -> AsyncIterator[tuple[list[str], str]]:
    identity = Identity(component, NAMESPACE, tls)
    server = grpc.aio.server(interceptors=interceptors(identity))
    worker = Worker()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(Handoff(worker.calls), server)
    port = identity.add_port(server, "127.0.0.1:0")
    await server.start()
    yield worker.calls, f"127.0.0.1:{port}"
    await server.stop(None)


async def call_all(channel: grpc.aio.Channel) -> dict[str, str]:
    """What became of a call of each method: OK or the status."""
    worker, handoff = worker_pb2_grpc.WorkerServiceStub(channel), handoff_pb2_grpc.HandoffServiceStub(channel)
    streams = {"worker": worker.Connect(timeout=_LIMIT_S), "handoff": handoff.Connect(timeout=_LIMIT_S)}
    outcome = {}
    for name, call in streams.items():
        outcome[name] = await _outcome(_read(call))
        call.cancel()
    outcome["audit"] = await _outcome(worker.Audit(worker_pb2.AuditRequest(), timeout=_LIMIT_S))
    return outcome


async def _read(call: Any) -> None:
    assert await call.read() is not grpc.aio.EOF


async def _outcome(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


REFUSED = "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("caller", "worker", "handoff", "audit"),
    [
        ("router", "OK", REFUSED, "OK"),
        ("prefill", REFUSED, "OK", REFUSED),
        ("decode", REFUSED, REFUSED, REFUSED),
        ("operator", REFUSED, REFUSED, "OK"),
        ("front", REFUSED, REFUSED, REFUSED),
    ],
)
async def test_each_role_may_call_what_it_needs_and_nothing_else(
    mounted: Path, caller: str, worker: str, handoff: str, audit: str
) -> None:
    async with (
        serving(tls_settings(mounted)) as (calls, address),
        Identity(caller, NAMESPACE, tls_settings(mounted)).channel(address, "decode") as channel,
    ):
        outcome = await call_all(channel)
    assert outcome == {"worker": worker, "handoff": handoff, "audit": audit}
    assert sorted(calls) == sorted(name for name, result in outcome.items() if result == "OK")


async def test_a_refusal_names_the_method_and_both_roles(mounted: Path) -> None:
    async with (
        serving(tls_settings(mounted)) as (_, address),
        Identity("decode", NAMESPACE, tls_settings(mounted)).channel(address, "decode") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker_pb2_grpc.WorkerServiceStub(channel).Audit(worker_pb2.AuditRequest(), timeout=_LIMIT_S)
    text = "/Audit is for operator or router; the certificate of the caller names decode"
    assert str(refused.value.details()).endswith(text)


async def test_a_caller_without_certificate_gets_no_connection(mounted: Path) -> None:
    async with serving(tls_settings(mounted)) as (calls, address):
        authority = grpc.ssl_channel_credentials((mounted / "ca.crt").read_bytes())
        name = [("grpc.ssl_target_name_override", certificate_name("decode", NAMESPACE))]
        async with grpc.aio.secure_channel(address, authority, options=name) as channel:
            assert set((await call_all(channel)).values()) == {"UNAVAILABLE"}
        async with grpc.aio.insecure_channel(address) as channel:
            assert set((await call_all(channel)).values()) == {"UNAVAILABLE"}
    assert calls == []


async def test_a_certificate_of_another_ca_gets_no_connection(mounted: Path, tmp_path: Path) -> None:
    """The caller even believes the right CA: it is the server that refuses."""
    foreign = tls_settings(new_certs(tmp_path / "foreign"))
    tls = foreign.model_copy(update={"ca_file": f"{mounted}/ca.crt"})
    async with (
        serving(tls_settings(mounted)) as (calls, address),
        Identity("router", NAMESPACE, tls).channel(address, "decode") as channel,
    ):
        assert set((await call_all(channel)).values()) == {"UNAVAILABLE"}
    assert calls == []


async def test_an_expired_certificate_gets_no_connection(tmp_path: Path) -> None:
    """All of one CA; the router's has ended."""
    mounted = new_certs(tmp_path / "tls")
    ended = tmp_path / "ended"
    ended.mkdir()
    for name in ("ca.crt", "ca.key"):
        (ended / name).write_bytes((mounted / name).read_bytes())
    new_certs(ended, days=-0.5)
    async with (
        serving(tls_settings(mounted)) as (calls, address),
        Identity("router", NAMESPACE, tls_settings(ended)).channel(address, "decode") as channel,
    ):
        assert set((await call_all(channel)).values()) == {"UNAVAILABLE"}
    assert calls == []


async def test_a_server_of_another_role_is_not_talked_to(mounted: Path) -> None:
    """L-10: whoever writes a foreign address into the registry does not get our requests."""
    tls = tls_settings(mounted)
    async with (
        serving(tls, "prefill") as (calls, address),
        Identity("router", NAMESPACE, tls).channel(address, "decode") as channel,
    ):
        assert set((await call_all(channel)).values()) == {"UNAVAILABLE"}
    assert calls == []


async def test_clusters_under_one_ca_stay_apart(mounted: Path, tmp_path: Path) -> None:
    """A certificate of another namespace names no role here."""
    other = tmp_path / "other"
    other.mkdir()
    for name in ("ca.crt", "ca.key"):
        (other / name).write_bytes((mounted / name).read_bytes())
    new_certs(other, "staging")
    async with (
        serving(tls_settings(mounted)) as (calls, address),
        Identity("router", NAMESPACE, tls_settings(other)).channel(address, "decode") as channel,
    ):
        assert set((await call_all(channel)).values()) == {REFUSED}
    assert calls == []


def renamed(mounted: Path, directory: Path, component: str, kind: Callable[[str], x509.GeneralName]) -> TlsSettings:
    """Certificates of the same CA, where the component's has its name as another kind of alternative name."""
    directory.mkdir()
    for name in ("ca.crt", "ca.key"):
        (directory / name).write_bytes((mounted / name).read_bytes())
    new_certs(directory)
    names = [kind(certificate_name(component, NAMESPACE)), x509.DNSName("localhost")]
    issuer = certs._read_ca(directory)
    certs._issue(directory, component, "renamed", 30, certs._extensions(names, issuer), issuer)
    return tls_settings(directory)


@pytest.mark.parametrize("kind", [x509.UniformResourceIdentifier, x509.RFC822Name])
async def test_only_a_dns_name_is_a_role(
    mounted: Path, tmp_path: Path, kind: Callable[[str], x509.GeneralName]
) -> None:
    """The right text in a field that means something else: neither a caller nor a server is believed."""
    tls = tls_settings(mounted)
    async with (
        serving(tls) as (calls, address),
        Identity("router", NAMESPACE, renamed(mounted, tmp_path / "caller", "router", kind)).channel(
            address, "decode"
        ) as channel,
    ):
        assert set((await call_all(channel)).values()) == {REFUSED}
    async with (
        serving(renamed(mounted, tmp_path / "server", "decode", kind)) as (more_calls, address),
        Identity("router", NAMESPACE, tls).channel(address, "decode") as channel,
    ):
        assert set((await call_all(channel)).values()) == {"UNAVAILABLE"}
    assert calls == more_calls == []


async def test_new_connections_see_a_replaced_certificate_and_old_ones_go_on(tmp_path: Path) -> None:
    mounted = new_certs(tmp_path / "tls")
    tls = tls_settings(mounted)
    async with serving(tls) as (_, address):
        router = Identity("router", NAMESPACE, tls)
        async with router.channel(address, "decode") as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
            await _read(call)
            for name in ("ca.crt", "ca.key"):
                (mounted / name).unlink()
            new_certs(mounted)  # even the CA is another
            await call.write(worker_pb2.ConnectRequest())
            await _read(call)
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with router.channel(address, "decode", options) as later:
                assert (await call_all(later))["worker"] == "OK"
            call.cancel()


async def test_without_certificates_everybody_is_answered() -> None:
    async with serving(None) as (_, address), Identity("router", NAMESPACE).channel(address, "decode") as channel:
        assert set((await call_all(channel)).values()) == {"OK"}


async def test_a_method_that_is_not_listed_admits_nobody(mounted: Path) -> None:
    guard = RoleGuard(NAMESPACE, {})
    identity = Identity("decode", NAMESPACE, tls_settings(mounted))
    server = grpc.aio.server(interceptors=[guard])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)
    port = identity.add_port(server, "127.0.0.1:0")
    await server.start()
    async with Identity("router", NAMESPACE, tls_settings(mounted)).channel(f"127.0.0.1:{port}", "decode") as channel:
        assert (await call_all(channel))["audit"] == REFUSED
    await server.stop(None)


def test_every_method_between_components_is_listed() -> None:
    services = [*worker_pb2.DESCRIPTOR.services_by_name.values(), *handoff_pb2.DESCRIPTOR.services_by_name.values()]
    assert {f"/{method.containing_service.full_name}/{method.name}" for s in services for method in s.methods} == set(
        ADMITTED
    )


def test_a_role_is_the_whole_name_and_nothing_like_it() -> None:
    near = [b"router.pdserve", b"router.pdserve.pdserve.org", b"ROUTER.pdserve.pdserve", b"x.router.pdserve.pdserve"]
    assert roles_of(near, NAMESPACE) == frozenset()
    assert roles_of([b"a", b"router.pdserve.pdserve"], NAMESPACE) == {Component.ROUTER}
