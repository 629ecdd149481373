"""Router <-> worker messages between their two forms: `common/values/messages.py` values and protobuf. Pure: no IO.

Owns nothing. Maps come back sorted by key, so a value with sorted pairs survives a round trip. Whatever a
peer sends that is no message of ours becomes a `PeerError`; ranges of the fields are the sender's business.
"""

from typing import assert_never

from common.values.errors import PeerError
from common.values.ids import RouterId, WorkerRef
from common.values.messages import (
    AttemptFailed,
    AttemptTokens,
    Cancel,
    Drain,
    FirstTokens,
    Granted,
    HandoffReport,
    Prefill,
    Refused,
    Reserve,
    Role,
    RouterHello,
    RouterMessage,
    TokenBatch,
    TransferFailed,
    WorkerInfo,
    WorkerMessage,
    WorkerState,
    WorkerStats,
)
from common.values.request import ChunkTiming, Fingerprint, KvChunkTiming
from common.wire.parts import (
    attempt_id_from_pb,
    attempt_id_to_pb,
    prefill_try_from_pb,
    token_from_pb,
    token_to_pb,
    work_from_pb,
    work_to_pb,
)
from common.wire.pb import worker_pb2 as pb


def router_message_to_pb(message: RouterMessage) -> pb.ConnectRequest:
    match message:
        case RouterHello(router_id):
            return pb.ConnectRequest(hello=pb.RouterHello(router_id=router_id))
        case Reserve(work, local_max):
            reserve = pb.Reserve(work=work_to_pb(work), local_prefill_max_tokens=local_max)
            return pb.ConnectRequest(reserve=reserve)
        case Prefill():
            return pb.ConnectRequest(prefill=_prefill_to_pb(message))
        case Cancel(attempt_id, choices):
            return pb.ConnectRequest(cancel=pb.Cancel(attempt_id=attempt_id_to_pb(attempt_id), choices=choices))
        case Drain(grace_s):
            return pb.ConnectRequest(drain=pb.Drain(grace_s=grace_s))
        case _:
            assert_never(message)


def router_message_from_pb(request: pb.ConnectRequest) -> RouterMessage:
    """Raises PeerError when the message is empty or malformed."""
    kind = request.WhichOneof("message")
    match kind:
        case "hello":
            return RouterHello(RouterId(request.hello.router_id))
        case "reserve":
            return Reserve(work_from_pb(request.reserve.work), request.reserve.local_prefill_max_tokens)
        case "prefill":
            return _prefill_from_pb(request.prefill)
        case "cancel":
            return Cancel(attempt_id_from_pb(request.cancel.attempt_id), tuple(request.cancel.choices))
        case "drain":
            return Drain(request.drain.grace_s)
        case "batch" | None:
            raise PeerError("a router sent a message of no known kind")
        case _:
            assert_never(kind)


def worker_message_to_pb(message: WorkerMessage) -> pb.ConnectResponse:
    match message:
        case WorkerInfo():
            return pb.ConnectResponse(hello=_info_to_pb(message))
        case Granted():
            return pb.ConnectResponse(granted=_granted_to_pb(message))
        case Refused():
            return pb.ConnectResponse(refused=_refused_to_pb(message))
        case FirstTokens():
            return pb.ConnectResponse(first_tokens=_first_tokens_to_pb(message))
        case TokenBatch():
            return pb.ConnectResponse(token_batch=_token_batch_to_pb(message))
        case HandoffReport():
            return pb.ConnectResponse(handoff_report=_report_to_pb(message))
        case TransferFailed():
            return pb.ConnectResponse(transfer_failed=_transfer_failed_to_pb(message))
        case AttemptFailed():
            return pb.ConnectResponse(attempt_failed=_attempt_failed_to_pb(message))
        case WorkerStats():
            return pb.ConnectResponse(stats=_stats_to_pb(message))
        case _:
            assert_never(message)


def worker_message_from_pb(response: pb.ConnectResponse) -> WorkerMessage:
    """Raises PeerError when the message is empty or malformed."""
    try:
        return _worker_message_from_pb(response)
    except ValueError as error:  # a state, role or finish reason that we do not know
        raise PeerError(f"a worker sent a malformed message: {error}") from error


def _worker_message_from_pb(response: pb.ConnectResponse) -> WorkerMessage:
    kind = response.WhichOneof("message")
    match kind:
        case "token_batch":
            return _token_batch_from_pb(response.token_batch)
        case "stats":
            return _stats_from_pb(response.stats)
        case "first_tokens":
            return _first_tokens_from_pb(response.first_tokens)
        case "granted":
            return _granted_from_pb(response.granted)
        case "handoff_report":
            return _report_from_pb(response.handoff_report)
        case "hello":
            return _info_from_pb(response.hello)
        case "batch" | None:
            raise PeerError("a worker sent a message of no known kind")
        case _:
            return _ending_from_pb(response)


def _ending_from_pb(response: pb.ConnectResponse) -> Refused | TransferFailed | AttemptFailed:
    if response.HasField("refused"):
        return _refused_from_pb(response.refused)
    if response.HasField("transfer_failed"):
        return _transfer_failed_from_pb(response.transfer_failed)
    assert response.HasField("attempt_failed"), f"no conversion for {response.WhichOneof('message')}"
    return _attempt_failed_from_pb(response.attempt_failed)


# ---- router -> worker -------------------------------------------------------------------------------


def _prefill_to_pb(message: Prefill) -> pb.Prefill:
    return pb.Prefill(
        work=work_to_pb(message.work),
        prefill_try=message.prefill_try,
        decode_worker_id=message.decode_worker.worker_id,
        decode_incarnation=message.decode_worker.incarnation,
        decode_address=message.decode_address,
        first_missing_token=message.first_missing_token,
    )


def _prefill_from_pb(prefill: pb.Prefill) -> Prefill:
    return Prefill(
        work=work_from_pb(prefill.work),
        prefill_try=prefill.prefill_try,
        decode_worker=WorkerRef(prefill.decode_worker_id, prefill.decode_incarnation),
        decode_address=prefill.decode_address,
        first_missing_token=prefill.first_missing_token,
    )


# ---- worker -> router -------------------------------------------------------------------------------


def _info_to_pb(info: WorkerInfo) -> pb.WorkerHello:
    return pb.WorkerHello(
        worker_id=info.ref.worker_id,
        incarnation=info.ref.incarnation,
        role=info.role,
        model_name=info.model_name,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        pid=info.pid,
        fingerprint=dict(info.fingerprint.fields),
        handoff_address=info.handoff_address,
        device=info.device,
    )


def _info_from_pb(hello: pb.WorkerHello) -> WorkerInfo:
    return WorkerInfo(
        ref=WorkerRef(hello.worker_id, hello.incarnation),
        role=Role(hello.role),
        model_name=hello.model_name,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        max_model_len=hello.max_model_len,
        max_num_seqs=hello.max_num_seqs,
        pid=hello.pid,
        fingerprint=Fingerprint(tuple(sorted(hello.fingerprint.items()))),
        handoff_address=hello.handoff_address,
        device=hello.device,
    )


def _granted_to_pb(message: Granted) -> pb.Granted:
    return pb.Granted(
        attempt_id=attempt_id_to_pb(message.attempt_id),
        first_missing_token=message.first_missing_token,
        is_local=message.is_local,
    )


def _granted_from_pb(granted: pb.Granted) -> Granted:
    return Granted(attempt_id_from_pb(granted.attempt_id), granted.first_missing_token, granted.is_local)


def _refused_to_pb(message: Refused) -> pb.Refused:
    return pb.Refused(
        attempt_id=attempt_id_to_pb(message.attempt_id),
        reason=message.reason,
        is_retryable=message.is_retryable,
        prefill_try=message.prefill_try,
    )


def _refused_from_pb(refused: pb.Refused) -> Refused:
    attempt_id, prefill_try = attempt_id_from_pb(refused.attempt_id), prefill_try_from_pb(refused)
    return Refused(attempt_id, refused.reason, refused.is_retryable, prefill_try)


def _first_tokens_to_pb(message: FirstTokens) -> pb.FirstTokens:
    return pb.FirstTokens(
        attempt_id=attempt_id_to_pb(message.attempt_id),
        prefill_try=message.prefill_try,
        tokens=[token_to_pb(event) for event in message.tokens],
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        num_cached_tokens=message.num_cached_tokens,
        chunks=[
            pb.PrefillChunk(start_s=chunk.start_s, end_s=chunk.end_s, num_tokens=chunk.num_tokens)
            for chunk in message.chunks
        ],
    )


def _first_tokens_from_pb(first: pb.FirstTokens) -> FirstTokens:
    return FirstTokens(
        attempt_id=attempt_id_from_pb(first.attempt_id),
        prefill_try=first.prefill_try,
        tokens=tuple(token_from_pb(token) for token in first.tokens),
        queue_s=first.queue_s,
        prefill_s=first.prefill_s,
        num_cached_tokens=first.num_cached_tokens,
        chunks=tuple(ChunkTiming(chunk.start_s, chunk.end_s, chunk.num_tokens) for chunk in first.chunks),
    )


def _token_batch_to_pb(batch: TokenBatch) -> pb.TokenBatch:
    return pb.TokenBatch(
        attempts=[
            pb.AttemptTokens(
                attempt_id=attempt_id_to_pb(attempt.attempt_id),
                tokens=[token_to_pb(event) for event in attempt.tokens],
            )
            for attempt in batch.attempts
        ]
    )


def _token_batch_from_pb(batch: pb.TokenBatch) -> TokenBatch:
    return TokenBatch(
        tuple(
            AttemptTokens(
                attempt_id_from_pb(attempt.attempt_id), tuple(token_from_pb(token) for token in attempt.tokens)
            )
            for attempt in batch.attempts
        )
    )


def _report_to_pb(report: HandoffReport) -> pb.HandoffReport:
    return pb.HandoffReport(
        attempt_id=attempt_id_to_pb(report.attempt_id),
        num_bytes=report.num_bytes,
        num_chunks=report.num_chunks,
        transfer_s=report.transfer_s,
        exposed_s=report.exposed_s,
        decode_queue_s=report.decode_queue_s,
        num_cached_tokens=report.num_cached_tokens,
        is_local=report.is_local,
        local_prefill_s=report.local_prefill_s,
        chunks=[
            pb.KvChunkTiming(
                before_end_s=chunk.before_end_s,
                layer_start=chunk.layer_start,
                layer_end=chunk.layer_end,
                num_tokens=chunk.num_tokens,
            )
            for chunk in report.chunks
        ],
    )


def _report_from_pb(report: pb.HandoffReport) -> HandoffReport:
    return HandoffReport(
        attempt_id=attempt_id_from_pb(report.attempt_id),
        num_bytes=report.num_bytes,
        num_chunks=report.num_chunks,
        transfer_s=report.transfer_s,
        exposed_s=report.exposed_s,
        decode_queue_s=report.decode_queue_s,
        num_cached_tokens=report.num_cached_tokens,
        is_local=report.is_local,
        local_prefill_s=report.local_prefill_s,
        chunks=tuple(
            KvChunkTiming(chunk.before_end_s, chunk.layer_start, chunk.layer_end, chunk.num_tokens)
            for chunk in report.chunks
        ),
    )


def _transfer_failed_to_pb(message: TransferFailed) -> pb.TransferFailed:
    return pb.TransferFailed(
        attempt_id=attempt_id_to_pb(message.attempt_id), prefill_try=message.prefill_try, reason=message.reason
    )


def _transfer_failed_from_pb(failed: pb.TransferFailed) -> TransferFailed:
    return TransferFailed(attempt_id_from_pb(failed.attempt_id), failed.prefill_try, failed.reason)


def _attempt_failed_to_pb(message: AttemptFailed) -> pb.AttemptFailed:
    return pb.AttemptFailed(
        attempt_id=attempt_id_to_pb(message.attempt_id),
        reason=message.reason,
        is_retryable=message.is_retryable,
        prefill_try=message.prefill_try,
    )


def _attempt_failed_from_pb(failed: pb.AttemptFailed) -> AttemptFailed:
    attempt_id, prefill_try = attempt_id_from_pb(failed.attempt_id), prefill_try_from_pb(failed)
    return AttemptFailed(attempt_id, failed.reason, failed.is_retryable, prefill_try)


def _stats_to_pb(stats: WorkerStats) -> pb.WorkerStats:
    return pb.WorkerStats(
        state=stats.state,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_uncached_tokens=stats.num_waiting_uncached_tokens,
        kv_blocks_used=stats.kv_blocks_used,
        kv_blocks_cached=stats.kv_blocks_cached,
        kv_blocks_free=stats.kv_blocks_free,
        kv_blocks_held=stats.kv_blocks_held,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        step_s=stats.step_s,
        num_preemptions=stats.num_preemptions,
        num_held_attempts=stats.num_held_attempts,
    )


def _stats_from_pb(stats: pb.WorkerStats) -> WorkerStats:
    return WorkerStats(
        state=WorkerState(stats.state),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_uncached_tokens=stats.num_waiting_uncached_tokens,
        kv_blocks_used=stats.kv_blocks_used,
        kv_blocks_cached=stats.kv_blocks_cached,
        kv_blocks_free=stats.kv_blocks_free,
        kv_blocks_held=stats.kv_blocks_held,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        step_s=stats.step_s,
        num_preemptions=stats.num_preemptions,
        num_held_attempts=stats.num_held_attempts,
    )
