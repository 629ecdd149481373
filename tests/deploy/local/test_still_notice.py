"""When `pdserve up` says why its cluster is not ready."""

from dataclasses import replace

from common.values.messages import Role
from deploy.local.cluster import STILL_S, _StillNotice
from deploy.scaling.pool_members import PoolStatus

PREFILL = PoolStatus(Role.PREFILL, 1, 0, 1, 0, (), 0, "", 0.0, 0, None)
DECODE = replace(PREFILL, role=Role.DECODE, desired=0, ready=0)
REASONS = ["no decode worker is ready"]


def test_an_empty_pool_is_said_once_with_the_command_that_fills_it() -> None:
    said: list[str] = []
    notice = _StillNotice(said.append)
    for now_s in (0.0, 0.1, STILL_S - 0.1):
        notice.look(REASONS, [PREFILL, DECODE], now_s)
    assert said == []
    for now_s in (STILL_S, STILL_S + 1, STILL_S + 99):
        notice.look(REASONS, [PREFILL, DECODE], now_s)
    advice = "its pool is to have none, pdserve scale decode=1 starts one"
    assert said == [f"not ready: no decode worker is ready; {advice}"]


def test_nothing_is_said_while_a_worker_is_on_its_way() -> None:
    said: list[str] = []
    notice = _StillNotice(said.append)
    loading = replace(DECODE, desired=1, starting=1)
    for now_s in (0.0, 10.0, 20.0):
        notice.look(REASONS, [PREFILL, loading], now_s)
    notice.look(REASONS, [PREFILL, DECODE], 20.1)
    assert said == []
