"""Updates of a request, the model and the cluster as protobuf messages. Pure: no IO."""

import json
from collections.abc import Iterator, Sequence

from google.protobuf.duration_pb2 import Duration

from common.values.messages import Role, WorkerState
from common.values.request import FinishReason, SampledToken
from common.wire.pb import generation_pb2 as pb
from router.core.generation import Accepted, RequestTimings
from router.front.output import Summary
from router.front.scored_prompt import ScoredPrompt, ScoredToken
from router.front.service_protocol import ClusterState, WorkerView
from router.request.served_model import ServedModel
from router.text.choice_text import CallPart, ChoiceDelta, ChoiceEnd
from router.text.token_text import TokenTexts

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    None: pb.FINISH_REASON_ABORT,
}
_ROLES = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_STATES = {
    WorkerState.LOADING: pb.WORKER_STATE_LOADING,
    WorkerState.READY: pb.WORKER_STATE_READY,
    WorkerState.DRAINING: pb.WORKER_STATE_DRAINING,
    WorkerState.UNHEALTHY: pb.WORKER_STATE_UNHEALTHY,
}


def accepted_pb(accepted: Accepted) -> pb.Accepted:
    return pb.Accepted(
        prefill_worker_id=accepted.prefill_worker_id,
        decode_worker_id=accepted.decode_worker_id,
        prompt_tokens=accepted.num_prompt_tokens,
        cached_tokens=accepted.num_cached_tokens,
    )


def chunk_pb(delta: ChoiceDelta, num_logprobs: int | None, token_texts: TokenTexts) -> pb.TokenChunk:
    """`num_logprobs` None: none are asked for."""
    chunk = pb.TokenChunk(
        index=delta.choice_idx,
        token_ids=[token.token_id for token in delta.tokens],
        text=delta.text,
        reasoning=delta.reasoning,
        tool_calls=map(_call_pb, delta.calls),
    )
    if num_logprobs is not None:
        chunk.logprobs.extend(_logprobs(token, num_logprobs, token_texts) for token in delta.tokens)
    return chunk


def echo_pb(index: int, token_ids: Sequence[int], text: str) -> pb.TokenChunk:
    """The prompt, before the first output of a choice."""
    return pb.TokenChunk(index=index, token_ids=token_ids, text=text)


def add_prompt_logprobs(
    first: pb.TokenChunk, prompt: ScoredPrompt, num_top: int, token_texts: TokenTexts
) -> Iterator[pb.TokenChunk]:
    """`first` with those of the first tokens, and as many more chunks as the others need."""
    for part in prompt.parts():
        first.prompt_logprobs.extend(_logprobs(token, num_top, token_texts) for token in part)
        yield first
        first = pb.TokenChunk(index=first.index)


def finished_pb(
    index: int, end: ChoiceEnd, summary: Summary, num_discarded_tokens: int, *, has_timings: bool
) -> pb.Finished:
    """`usage` counts this choice's tokens; the prompt's are the same for every choice."""
    finished = pb.Finished(
        index=index,
        reason=pb.FINISH_REASON_TOOL_CALLS if end.waits_for_results else _REASONS[end.reason],
        usage=pb.Usage(
            prompt_tokens=summary.num_prompt_tokens,
            completion_tokens=end.num_tokens,
            cached_tokens=summary.num_cached_tokens,
            discarded_tokens=num_discarded_tokens,
        ),
    )
    if end.stop_string is not None:
        finished.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        finished.stop_token_id = end.stop_token_id
    if has_timings:
        finished.timings.CopyFrom(timings_pb(summary.timings))
    return finished


def _call_pb(part: CallPart) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=part.index, id=part.call_id, name=part.name, arguments=part.arguments)


def timings_pb(timings: RequestTimings) -> pb.RequestTimings:
    """route + prefill_queue + prefill + (kv_transfer - overlapped) + decode_queue + decode is the wall time."""
    overlapped_s = max(0.0, timings.kv_transfer_s - timings.kv_exposed_s)
    return pb.RequestTimings(
        route=duration_pb(timings.route_s),
        prefill_queue=duration_pb(timings.prefill_queue_s),
        prefill=duration_pb(timings.prefill_s),
        kv_transfer=duration_pb(overlapped_s + timings.kv_exposed_s),
        kv_transfer_overlapped=duration_pb(overlapped_s),
        decode_queue=duration_pb(timings.decode_queue_s),
        time_to_first_token=duration_pb(timings.time_to_first_token_s),
        decode=duration_pb(timings.decode_s),
        kv_bytes=timings.kv_bytes,
        retries=timings.num_retries,
    )


def duration_pb(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def model_info_pb(model: ServedModel, state: ClusterState) -> pb.GetModelInfoResponse:
    """Block size and KV dtype are the workers'; without a worker they are not known."""
    worker = state.workers[0] if state.workers else None
    return pb.GetModelInfoResponse(
        model=model.name,
        model_path=model.path,
        model_type=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        default_sampling_json=json.dumps(dict(model.generation_defaults), sort_keys=True),
        block_size=worker.block_size if worker else 0,
        kv_dtype=worker.kv_dtype if worker else "",
    )


def workers_pb(state: ClusterState) -> list[pb.Worker]:
    return [_worker(worker) for worker in state.workers]


def _worker(worker: WorkerView) -> pb.Worker:
    return pb.Worker(
        worker_id=worker.worker_id,
        role=_ROLES[worker.role],
        state=_STATES[worker.state],
        address=worker.address,
        running=worker.running,
        waiting=worker.waiting,
        waiting_uncached_tokens=worker.waiting_uncached_tokens,
        kv_blocks_total=worker.kv_blocks_total,
        kv_blocks_used=worker.kv_blocks_used,
        kv_blocks_cached=worker.kv_blocks_cached,
        kv_blocks_free=worker.kv_blocks_free,
        kv_blocks_held=worker.kv_blocks_held,
        block_size=worker.block_size,
        pairing_key=worker.pairing_key,
        pid=worker.pid,
    )


def _logprobs(token: SampledToken | ScoredToken, num_top: int, token_texts: TokenTexts) -> pb.TokenLogprobs:
    entry = pb.TokenLogprobs(token_id=token.token_id, token=token_texts.text(token.token_id), logprob=token.logprob)
    entry.top.extend(
        pb.TopLogprob(token_id=token_id, token=token_texts.text(token_id), logprob=logprob)
        for token_id, logprob in token.top[:num_top]
    )
    return entry
