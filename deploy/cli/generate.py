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
from deploy.client.addresses import grpc_address, mistaken_server
from deploy.client.credentials import API_KEY_VARIABLE, api_key_of_environment
from deploy.client.tls import CA_VARIABLE, ca_file

# gRPC's words when there is no connection; a router's own UNAVAILABLE says what is missing.
_NO_CONNECTION = ("connect", "resol", "Socket closed", "GOAWAY", "handshake", "end of TCP stream", "protocol")


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

    request_id: str = ""
    text: str = ""
    reasoning: str = ""
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
            "request_id": self.request_id,
            "text": self.text,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
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
    address, is_tls = grpc_address(server)
    with _channel(address, is_tls=is_tls) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            for response in stub.Generate(question.request(), timeout=timeout_s, metadata=_metadata()):
                _take(answer, response, on_text)
        except grpc.RpcError as error:
            raise GenerateFailed(_explain(address, error, is_tls=is_tls)) from error
    return answer


def run_generate(server: str, question: Ask, *, as_json: bool, timeout_s: float | None) -> None:
    """`pdserve generate`: the answer, and how to see more of it."""
    answer = print_answer(server, question, as_json=as_json, timeout_s=timeout_s)
    if not as_json:
        print(f"more: pdserve explain {answer.request_id}")


def print_answer(server: str, question: Ask, *, as_json: bool, timeout_s: float | None = None) -> Answer:
    """Stream the text, then the waterfall; or one JSON object."""
    answer = ask(server, question, _ignore if as_json else _print_piece, timeout_s)
    if as_json:
        print(json.dumps(answer.as_json()))
        return answer
    print("\n")
    print("\n".join(render(answer.waterfall())))
    usage = answer.finished.usage
    print(
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), answer {usage.completion_tokens}; "
        f"prefill on {answer.accepted.prefill_worker_id or '-'}, decode on {answer.accepted.decode_worker_id}"
    )
    return answer


def _channel(address: str, *, is_tls: bool) -> grpc.Channel:
    """The CA is that of the environment, or one of the machine's."""
    if not is_tls:
        return grpc.insecure_channel(address, options=channel_options())
    path = ca_file()
    try:
        credentials = grpc.ssl_channel_credentials(Path(path).read_bytes() if path else None)
    except OSError as error:
        raise GenerateFailed(f"{path} (from {CA_VARIABLE}): {error.strerror}") from error
    return grpc.secure_channel(address, credentials, options=channel_options())


def _metadata() -> tuple[tuple[str, str], ...]:
    """The API key, for routers that ask for one."""
    key = api_key_of_environment()
    return (("authorization", f"Bearer {key}"),) if key else ()


def _take(answer: Answer, response: pb.GenerateResponse, on_text: Callable[[str], None]) -> None:
    answer.request_id = response.request_id
    match response.WhichOneof("event"):
        case "accepted":
            answer.accepted = response.accepted
        case "chunk":
            thought, text = response.chunk.reasoning, response.chunk.text
            answer.reasoning += thought
            has_gap = bool(text and answer.reasoning and not answer.text)
            answer.text += text
            answer.token_ids += response.chunk.token_ids
            on_text(f"{thought}\n\n{text}" if has_gap else thought + text)
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


def _explain(address: str, error: grpc.RpcError, *, is_tls: bool) -> str:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and any(word in details for word in _NO_CONNECTION):
        return mistaken_server(address, is_tls=is_tls)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{details} (pdserve generate takes the key from ${API_KEY_VARIABLE})"
    return f"{code.name}: {details}"
