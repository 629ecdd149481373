"""`pdserve generate`: asks a router over gRPC, prints the text as it comes and then where the time went."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from common.wire.grpc_options import channel_options
from common.wire.pb import generation_pb2 as pb
from common.wire.pb import generation_pb2_grpc
from deploy.cli.waterfall import Waterfall, render
from deploy.client.credentials import API_KEY_VARIABLE, api_key_of_environment
from deploy.client.tls import CA_VARIABLE, ca_file

_TLS_SCHEME = "https://"


class GenerateFailed(Exception):
    """The server refused or lost the request; the message is for the person who typed the command."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the command line asked for; None = the server's default."""

    prompt: str
    is_chat: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def request(self) -> pb.GenerateRequest:
        request = pb.GenerateRequest(stream=True, output=pb.OutputOptions(return_timings=True))
        if self.is_chat:
            request.chat.messages.add(role="user", content=self.prompt)
            request.chat.add_generation_prompt = True
        else:
            request.prompt = self.prompt
        for name in ("temperature", "top_p", "top_k", "seed"):
            value = getattr(self, name)
            if value is not None:
                setattr(request.sampling, name, value)
        if self.max_tokens is not None:
            request.stop.max_tokens = self.max_tokens
        request.stop.stop.extend(self.stop)
        return request


@dataclass(slots=True)
class Answer:
    """All that came back."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    accepted: pb.Accepted = field(default_factory=pb.Accepted)
    finished: pb.Finished = field(default_factory=pb.Finished)

    def waterfall(self) -> Waterfall:
        timings = self.finished.timings
        hidden_s = _seconds(timings.kv_transfer_overlapped)
        return Waterfall(
            route_s=_seconds(timings.route),
            queue_s=_seconds(timings.prefill_queue),
            prefill_s=_seconds(timings.prefill),
            hidden_transfer_s=hidden_s,
            exposed_transfer_s=max(0.0, _seconds(timings.kv_transfer) - hidden_s),
            decode_queue_s=_seconds(timings.decode_queue),
            decode_s=_seconds(timings.decode),
            first_token_s=_seconds(timings.time_to_first_token),
            kv_bytes=timings.kv_bytes,
            num_tokens=self.finished.usage.completion_tokens,
        )

    def as_json(self) -> dict[str, Any]:
        """For `--json`: text, tokens, who served it, usage and timings in milliseconds."""
        waterfall, usage = self.waterfall(), self.finished.usage
        names = [name for name in Waterfall.__slots__ if name.endswith("_s")]
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_").lower(),
            "prefill_worker_id": self.accepted.prefill_worker_id,
            "decode_worker_id": self.accepted.decode_worker_id,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "timings_ms": {name.removesuffix("_s"): round(getattr(waterfall, name) * 1000, 3) for name in names},
            "kv_bytes": waterfall.kv_bytes,
        }


def ask(server: str, question: Ask, on_text: Callable[[str], None], timeout_s: float | None = None) -> Answer:
    """Run one request; `on_text` gets the text piece by piece. Raises GenerateFailed."""
    answer = Answer()
    with _channel(server) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            for response in stub.Generate(question.request(), timeout=timeout_s, metadata=_metadata()):
                _take(answer, response, on_text)
        except grpc.RpcError as error:
            raise GenerateFailed(_explain(server, error)) from error
    return answer


def print_answer(server: str, question: Ask, *, as_json: bool, timeout_s: float | None = None) -> None:
    """The whole command: stream the text, then the waterfall; or one JSON object."""
    answer = ask(server, question, _ignore if as_json else _print_piece, timeout_s)
    if as_json:
        print(json.dumps(answer.as_json()))
        return
    print("\n")
    print("\n".join(render(answer.waterfall())))
    usage = answer.finished.usage
    print(
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), answer {usage.completion_tokens}; "
        f"prefill on {answer.accepted.prefill_worker_id or 'nobody'}, decode on {answer.accepted.decode_worker_id}"
    )


def _channel(server: str) -> grpc.Channel:
    """`https://HOST:PORT` means TLS; the CA is that of the environment, or one of the machine's."""
    if not server.startswith(_TLS_SCHEME):
        return grpc.insecure_channel(server, options=channel_options())
    path = ca_file()
    try:
        credentials = grpc.ssl_channel_credentials(Path(path).read_bytes() if path else None)
    except OSError as error:
        raise GenerateFailed(f"{path} (from {CA_VARIABLE}): {error.strerror}") from error
    return grpc.secure_channel(server.removeprefix(_TLS_SCHEME), credentials, options=channel_options())


def _metadata() -> tuple[tuple[str, str], ...]:
    """The API key, for routers that ask for one."""
    key = api_key_of_environment()
    return (("authorization", f"Bearer {key}"),) if key else ()


def _take(answer: Answer, response: pb.GenerateResponse, on_text: Callable[[str], None]) -> None:
    match response.WhichOneof("event"):
        case "accepted":
            answer.accepted = response.accepted
        case "chunk":
            answer.text += response.chunk.text
            answer.token_ids += response.chunk.token_ids
            on_text(response.chunk.text)
        case "finished":
            answer.finished = response.finished


def _print_piece(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    """`--json` prints everything at the end."""


def _seconds(duration: Any) -> float:
    """google.protobuf.Duration has no type information here."""
    return float(duration.seconds) + float(duration.nanos) * 1e-9


def _explain(server: str, error: grpc.RpcError) -> str:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in (details or ""):
        return (
            f"nothing answers at {server}: is pdserve up running? (--server or $PDSERVE_SERVER names another address)"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{details} (pdserve generate takes the key from ${API_KEY_VARIABLE})"
    return f"{code.name}: {details}"
