"""A codec is derived only where a class and its message have the same fields of the same types."""

import re
from dataclasses import dataclass

import pytest

from common.values.errors import PeerError
from common.values.ids import AttemptId, RequestId
from common.values.messages import WorkerStats
from common.wire.codec import derive
from common.wire.pb import worker_pb2 as pb


@dataclass(frozen=True)
class DrainOfMore:
    grace_s: float
    reason: str


@dataclass(frozen=True)
class WholeDrain:
    grace_s: int


@dataclass(frozen=True)
class Patience:
    grace_s: float | None


@dataclass(frozen=True)
class GrantedWithoutLocality:
    attempt_id: AttemptId
    first_missing_token: int


@dataclass(frozen=True)
class EagerFailure:
    attempt_id: AttemptId
    reason: str
    is_retryable: bool
    prefill_try: int


@dataclass(frozen=True)
class WordyCancel:
    attempt_id: AttemptId
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    prefill_try: int
    reason: str


@dataclass(frozen=True)
class Ended:
    attempt_id: AttemptId
    of: Failure


@dataclass(frozen=True)
class Sampled:
    """Its bias is of other keys than the message's."""

    logit_bias: tuple[tuple[str, float], ...]


def test_a_field_that_only_the_class_has_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=re.escape("DrainOfMore.reason is no field of pdserve.worker.v1.Drain")):
        derive(DrainOfMore, pb.Drain)


def test_a_field_that_only_the_message_has_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"GrantedWithoutLocality and .*Granted differ in \['is_local'\]"):
        derive(GrantedWithoutLocality, pb.Granted)


@pytest.mark.parametrize(
    ("value_class", "message_class", "problem"),
    [
        (WholeDrain, pb.Drain, "grace_s does not hold a <class 'int'>"),
        (WordyCancel, pb.Cancel, "choices does not hold a <class 'str'>"),
        (Sampled, pb.SamplingParams, "key does not hold a <class 'str'>"),
        (Patience, pb.Drain, "grace_s is not optional"),
        (EagerFailure, pb.AttemptFailed, "prefill_try is optional"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(value_class: type, message_class: type, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        derive(value_class, message_class)


def test_fields_of_a_class_stand_in_the_message_where_it_has_no_field_of_that_name() -> None:
    codec = derive(Ended, pb.TransferFailed)
    value = Ended(AttemptId(RequestId("r"), 3), Failure(2, "lost"))
    attempt_id = pb.AttemptId(request_id="r", attempt=3)
    assert codec.encode(value) == pb.TransferFailed(attempt_id=attempt_id, prefill_try=2, reason="lost")
    assert codec.decode(codec.encode(value)) == value


def test_an_unknown_value_of_an_enum_is_the_peers_error() -> None:
    with pytest.raises(PeerError, match="malformed WorkerStats: 'dancing'"):
        derive(WorkerStats, pb.WorkerStats).decode(pb.WorkerStats(state="dancing"))
