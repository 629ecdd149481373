"""What must hold on a prefill worker between any two events. Pure: no IO."""

from collections import Counter
from collections.abc import Mapping
from typing import assert_never

from common.engine.kv.block_pool import BlockPool, RefKind
from common.values.ids import AttemptId, TransferId
from prefill_worker.request import Phase, PrefillRequest
from prefill_worker.scheduler import PrefillScheduler


def check_requests(
    pool: BlockPool,
    scheduler: PrefillScheduler,
    requests: Mapping[TransferId, PrefillRequest],
    current: Mapping[AttemptId, PrefillRequest],
) -> None:
    """Every reference on a block has its owner; every request is in the places of its phase and in no other."""
    for kind in RefKind:
        owned = Counter(block for r in requests.values() if r.ref_kind is kind for block in r.block_table)
        assert all(pool.num_refs(block, kind) == owned[block] for block in range(pool.num_blocks))
    for transfer_id, request in requests.items():
        assert transfer_id == request.transfer_id
        assert (request.phase is Phase.ENDING) == (current.get(request.work.attempt_id) is not request), str(request)
        assert (request in scheduler.in_step) == (request.num_scheduled > 0), str(request)
        assert (request in scheduler.queued) == (request.phase in (Phase.WAITING, Phase.RUNNING)), str(request)
        num_blocks = 0 if request.phase is Phase.WAITING else pool.num_blocks_for(request.num_tokens)
        assert len(request.block_table) == num_blocks, str(request)
        assert 0 <= request.num_computed <= request.num_tokens, str(request)
        _check_phase(request)
    assert len(current) == sum(request.phase is not Phase.ENDING for request in requests.values())
    known = set(map(id, requests.values()))
    assert all(id(request) in known for request in (*scheduler.in_step, *scheduler.queued))
    # Requests may stand still only for blocks that a transfer keeps, which ends by itself.
    is_idle = scheduler.step_id is None
    assert not (is_idle and scheduler.queued) or any(r.is_transferring for r in requests.values()), "nothing goes on"


def _check_phase(request: PrefillRequest) -> None:
    match request.phase:
        case Phase.WAITING:
            assert not request.is_busy, str(request)
        case Phase.RUNNING:
            assert request.is_transferring, str(request)
            assert request.ref_kind is RefKind.USED, str(request)
        case Phase.COMPUTED:
            assert request.is_transferring, str(request)
            assert request.num_scheduled == 0, str(request)
            assert request.ref_kind is RefKind.HELD, str(request)
        case Phase.ENDING:
            assert request.is_busy, str(request)
        case _:
            assert_never(request.phase)
