"""The undisturbed life of a request."""

import pytest

from common.messages import Cancel, Prefill, Reserve
from common.request import FinishReason
from router.events import ChoiceStopped, NoteStaleHit
from router.generation import Accepted, Finished, Tokens
from router.router_limits import RouterLimits
from tests.router.kit import Driver, ref, request, token


def test_request_goes_reserve_prefill_decode_and_every_token_arrives_once() -> None:
    driver = Driver("p0", "d0")
    driver.submit(request(max_tokens=3))
    reserve = driver.take("d0")[0]
    assert isinstance(reserve, Reserve)
    assert reserve.work.token_ids == tuple(range(64))
    from common.messages import Granted

    driver.say("d0", Granted(reserve.work.attempt_id, 16, is_local=False))
    prefill = driver.first_tokens("p0")
    assert isinstance(prefill, Prefill)
    assert (prefill.decode_worker, prefill.decode_address, prefill.first_missing_token) == (ref("d0"), "d0:9", 16)
    driver.report("d0", prefill.work.attempt_id)
    driver.tokens("d0", prefill.work.attempt_id, token(0), token(1))
    driver.tokens("d0", prefill.work.attempt_id, token(2, finish=FinishReason.LENGTH))
    kinds = [type(event) for event in driver.events()]
    assert kinds == [Accepted, Tokens, Tokens, Tokens, Finished]
    assert driver.token_ids() == [100, 101, 102]
    assert driver.finished().num_completion_tokens == 3
    assert driver.take() == []  # the workers ended by themselves
    driver.assert_nothing_left()
