"""`pdserve generate` against a scripted gRPC server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from common.wire.pb import generation_pb2 as pb
from common.wire.pb import generation_pb2_grpc
from deploy.cli.generate import Ask, GenerateFailed, ask, print_answer, run_generate


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Keeps what was asked; answers two pieces, or an error."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.error: grpc.StatusCode | None = None
        self.thoughts: tuple[str, ...] = ()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        if self.error is not None:
            context.abort(self.error, "queue is full")
        yield pb.GenerateResponse(
            request_id="gen-17", accepted=pb.Accepted(prefill_worker_id="p0", decode_worker_id="d0")
        )
        for thought in self.thoughts:
            yield pb.GenerateResponse(chunk=pb.TokenChunk(reasoning=thought))
        yield pb.GenerateResponse(chunk=pb.TokenChunk(text="Paris", token_ids=[5]))
        yield pb.GenerateResponse(chunk=pb.TokenChunk(text=" it is.", token_ids=[6, 7]))
        finished = pb.Finished(
            reason=pb.FINISH_REASON_STOP, usage=pb.Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4)
        )
        for name, milliseconds in {
            "route": 1,
            "prefill": 40,
            "kv_transfer": 30,
            "kv_transfer_overlapped": 28,
            "decode": 60,
        }.items():
            getattr(finished.timings, name).FromMilliseconds(milliseconds)
        finished.timings.time_to_first_token.FromMilliseconds(43)
        finished.timings.kv_bytes = 1_000_000
        yield pb.GenerateResponse(request_id="gen-17", finished=finished)


@pytest.fixture
def service() -> Scripted:
    return Scripted()


@pytest.fixture
def server(service: Scripted) -> Iterator[str]:
    running = grpc.server(ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield f"127.0.0.1:{port}"
    running.stop(0).wait()


def test_text_comes_in_pieces_and_timings_at_the_end(server: str) -> None:
    pieces: list[str] = []
    answer = ask(server, Ask("?"), pieces.append)
    assert pieces == ["Paris", " it is."]
    assert (answer.text, answer.token_ids) == ("Paris it is.", [5, 6, 7])
    waterfall = answer.waterfall()
    assert waterfall.exposed_transfer_s == pytest.approx(0.002)
    assert waterfall.wall_s == pytest.approx(0.103)


def test_a_thought_is_shown_before_the_text_and_kept_apart(server: str, service: Scripted) -> None:
    service.thoughts = ("So ", "what?")
    pieces: list[str] = []
    answer = ask(server, Ask("?"), pieces.append)
    assert "".join(pieces) == "So what?\n\nParis it is."
    assert (answer.reasoning, answer.text) == ("So what?", "Paris it is.")
    assert answer.as_json()["reasoning"] == "So what?"


def test_options_become_fields_and_what_was_not_given_stays_absent(server: str, service: Scripted) -> None:
    ask(server, Ask("hi", is_chat=True, max_tokens=7, temperature=0.0, seed=0, stop=("END",)), lambda text: None)
    ask(server, Ask("hi"), lambda text: None)
    chat, plain = service.requests
    assert chat.chat.messages[0] == pb.ChatMessage(role="user", content="hi")
    assert chat.chat.add_generation_prompt
    assert (chat.stop.max_tokens, list(chat.stop.stop)) == (7, ["END"])
    assert chat.sampling.HasField("temperature")
    assert chat.sampling.HasField("seed")
    assert plain.prompt == "hi"
    assert not plain.sampling.ListFields()
    assert not plain.stop.ListFields()
    assert plain.stream
    assert plain.output.return_timings


def test_people_see_text_then_waterfall_then_who_did_it(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_generate(server, Ask("?"), as_json=False, timeout_s=None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Paris it is."
    labels = [line.split("|")[0].strip() for line in lines if "|" in line]
    assert labels == ["route", "queue", "prefill", "transfer", "decode queue", "decode"]
    assert lines[-2:] == [
        "prompt 9 tokens (4 cached), answer 3; prefill on p0, decode on d0",
        "more: pdserve explain gen-17",
    ]


def test_programs_get_one_json_object(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(server, Ask("?"), as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["request_id"], answer["text"]) == ("gen-17", "Paris it is.")
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4}
    assert answer["timings_ms"]["prefill"] == 40.0


def test_a_refusal_names_its_code_and_message(server: str, service: Scripted) -> None:
    service.error = grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(GenerateFailed, match="RESOURCE_EXHAUSTED: queue is full"):
        ask(server, Ask("?"), lambda text: None)


def test_no_server_is_explained() -> None:
    with pytest.raises(GenerateFailed, match="is pdserve up running"):
        ask("127.0.0.1:9", Ask("?"), lambda text: None, timeout_s=5)
