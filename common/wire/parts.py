"""What several router <-> worker messages carry, as values and as protobuf: attempt ids, work, tokens. Pure: no IO."""

import struct
from collections.abc import Sequence

from common.values.errors import PeerError
from common.values.ids import AttemptId, RequestId
from common.values.request import FinishReason, SampledToken, SamplingParams, TokenEvent, Work
from common.wire.pb import worker_pb2 as pb


def attempt_id_to_pb(attempt_id: AttemptId) -> pb.AttemptId:
    return pb.AttemptId(request_id=attempt_id.request_id, attempt=attempt_id.attempt)


def attempt_id_from_pb(attempt_id: pb.AttemptId) -> AttemptId:
    return AttemptId(RequestId(attempt_id.request_id), attempt_id.attempt)


def prefill_try_from_pb(message: pb.Refused | pb.AttemptFailed | pb.BlockHolder) -> int | None:
    """None: it is about no try of a prefill."""
    return message.prefill_try if message.HasField("prefill_try") else None


def work_to_pb(work: Work) -> pb.Work:
    return pb.Work(
        attempt_id=attempt_id_to_pb(work.attempt_id),
        token_ids=_packed(work.token_ids),
        num_prompt_tokens=work.num_prompt_tokens,
        choices=work.choices,
        sampling=sampling_to_pb(work.sampling),
        priority=work.priority,
        cache_salt=work.cache_salt,
        deadline_s=work.deadline_s,
        tenant=work.tenant,
    )


def work_from_pb(work: pb.Work) -> Work:
    """Raises PeerError when its token ids are no whole numbers."""
    return Work(
        attempt_id=attempt_id_from_pb(work.attempt_id),
        token_ids=_unpacked(work.token_ids),
        num_prompt_tokens=work.num_prompt_tokens,
        choices=tuple(work.choices),
        sampling=sampling_from_pb(work.sampling),
        priority=work.priority,
        cache_salt=work.cache_salt,
        deadline_s=work.deadline_s,
        tenant=work.tenant,
    )


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        num_logprobs=sampling.num_logprobs,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )


def sampling_from_pb(sampling: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
    )


def token_to_pb(event: TokenEvent) -> pb.Token:
    return pb.Token(
        choice_idx=event.choice_idx,
        position=event.position,
        token_id=event.token.token_id,
        logprob=event.token.logprob,
        top=[pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in event.token.top],
        finish_reason=event.finish_reason or "",
    )


def token_from_pb(token: pb.Token) -> TokenEvent:
    sampled = SampledToken(
        token_id=token.token_id,
        logprob=token.logprob if token.HasField("logprob") else None,
        top=tuple((entry.token_id, entry.logprob) for entry in token.top),
    )
    reason = FinishReason(token.finish_reason) if token.finish_reason else None
    return TokenEvent(token.choice_idx, token.position, sampled, reason)


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _unpacked(packed: bytes) -> tuple[int, ...]:
    if len(packed) % 4:
        raise PeerError(f"expected token ids of 4 bytes each, got {len(packed)} bytes")
    return struct.unpack(f"<{len(packed) // 4}I", packed)
