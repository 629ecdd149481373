"""Faults planted in production code on purpose: each must be caught, or the search, the simulator and the tests are
decoration. As a pytest plugin (`-p tests.simkit.mutants`) it plants the one that PDSERVE_MUTANT names.
"""

import importlib
import inspect
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

PLANTED = "PDSERVE_MUTANT"


@dataclass(frozen=True, slots=True)
class Mutant:
    """In the source of `target` ("module:Class.function"), `old` becomes `new`. `caught_by` each of:

    "handoff: WORLD", "cluster: WORLD" (the explorer), "simulator", or the id of a test.
    """

    name: str
    target: str
    old: str
    new: str
    caught_by: tuple[str, ...]


MUTANTS = (
    Mutant(
        "no deferred free on abort: a cancelled transfer ends while a pack reads its blocks",
        "kvtransfer.sender.core:SenderCore._end_if_unread",
        "transfer.num_unpacked == 0",
        "True",
        ("handoff: prefill worker cancels", "simulator"),
    ),
    Mutant(
        "no deferred free on abort: a withdrawn attempt is released while a write fills its blocks",
        "kvtransfer.receiver.core:ReceiverCore._release_if_unwritten",
        "attempt.num_writes == 0",
        "True",
        ("handoff: decode worker cancels",),
    ),
    Mutant(
        "the prefill worker frees KV before it is acknowledged",
        "prefill_worker.core:PrefillCore._start_transfer",
        "request.block_tables = self.state.scheduler.blocks.hold(sequence)",
        "request.block_tables = ()",
        ("cluster: the client leaves", "simulator"),
    ),
    Mutant(
        "acknowledged before every chunk is written",
        "kvtransfer.receiver.core:ReceiverCore._complete_if_all_written",
        "attempt.num_writes > 0 or transfer.finish is None or transfer.num_written < transfer.finish.num_chunks",
        "transfer.finish is None or transfer.num_announced < transfer.finish.num_chunks",
        ("handoff: no fault", "simulator"),
    ),
    Mutant(
        "a chunk of an older try is accepted",
        "kvtransfer.receiver.core:ReceiverCore._status_of",
        "transfer_id.prefill_try > attempt.newest_try and",
        "",
        ("tests/kvtransfer/test_receiver.py",),
    ),
    Mutant(
        "a corrupt chunk is written",
        "kvtransfer.receiver.core:ReceiverCore._write",
        "event.error is not None",
        "False",
        ("simulator",),
    ),
    Mutant(
        "a chunk that does not open is taken as it is",
        "kvtransfer.chunk.aead:Aead.decrypt",
        "return False",
        "return True",
        ("tests/kvtransfer/test_session_faults.py",),
    ),
    Mutant(
        "every message of a session has the same nonce",
        "kvtransfer.chunk.aead:Aead._next_nonce",
        "next(self._numbers)",
        "(0)",
        ("tests/kvtransfer/test_session_faults.py::test_a_message_of_the_same_chunk_sent_again_is_refused",),
    ),
    Mutant(
        "all sessions share a key",
        "kvtransfer.receiver.session:ReceiverSession.__init__",
        "secrets.token_bytes(KEY_BYTES)",
        "bytes(KEY_BYTES)",
        ("tests/kvtransfer/test_session_faults.py::test_a_message_of_an_earlier_session_at_the_same_place_is_refused",),
    ),
    Mutant(
        "layers 1 and 2 are swapped",
        "kvtransfer.receiver.core:ReceiverCore._write",
        "self._effects.append(WriteChunk(event.peer, event.transfer_id, chunk, block_table))",
        "import dataclasses; n = self._planner.spec.num_layers; "
        "swapped = dataclasses.replace(chunk, layer_start=n - chunk.layer_end, layer_end=n - chunk.layer_start); "
        "self._effects.append(WriteChunk(event.peer, event.transfer_id, swapped, block_table))",
        ("cluster: no fault", "simulator"),
    ),
    Mutant(
        "the router does not drop duplicate tokens",
        "router.core.request_state:Choice.accept",
        "self.has_diverged = event.token.token_id != self.token_ids[event.position]\n        return []",
        "return [event]",
        ("cluster: no fault", "simulator"),
    ),
    Mutant(
        "a retry has no new try number",
        "router.core.transitions:_start_prefill",
        "attempt.prefill_try + 1",
        "0",
        ("cluster: a session breaks",),
    ),
    Mutant(
        "a late message is acted on: a prefill worker fails after the decode worker took over",
        "router.core.core:RouterCore._hear_of_attempt",
        "phase = attempt.phase",
        "phase = attempt.phase if worker.is_decode else AttemptPhase.PREFILLING",
        ("tests/router/core/test_transitions.py::test_what_a_prefill_worker_says_in_every_phase",),
    ),
    Mutant(
        "the account depends on the race: a prefill worker's late message is not waited for",
        "router.core.request_state:Request.awaits_account",
        "is_measured and self.marks.first_tokens is None",
        "False",
        ("cluster: the first token is the last",),
    ),
    Mutant(
        "a count: tokens after a client's first are observed twice",
        "router.observe.request_metrics:RequestMetrics._tokens",
        'self._metrics.observe("pdserve_inter_token_latency_seconds", now_s - progress.last_tokens_s)',
        'self._metrics.observe("pdserve_inter_token_latency_seconds", now_s - progress.last_tokens_s); '
        'self._metrics.observe("pdserve_inter_token_latency_seconds", 0.0)',
        ("tests/router/test_counts.py",),
    ),
    Mutant(
        "a tenant's flood is served in order of arrival",
        "common.cores.fair_shares:FairShares.charge",
        "self._counters[tenant] += num_tokens",
        "pass",
        ("tests/router/core/test_fairness.py", "tests/common/cores/test_fair_shares.py"),
    ),
    Mutant(
        "a missing lease outranks an open stream",
        "router.core.roster:Roster.follow",
        "and stream is not StreamState.OPEN",
        "",
        ("tests/router/core/test_roster.py",),
    ),
    Mutant(
        "a worker that says nothing of its load is taken for idle",
        "router.core.policy:choose_prefiller",
        "if candidate.unknown:",
        "if False:",
        ("tests/router/core/test_balance.py",),
    ),
    Mutant(
        "a replay draws with another seed",
        "router.core.request_state:Request.work",
        "sampling=self.spec.sampling,",
        "sampling=__import__('dataclasses').replace(self.spec.sampling, seed=7)"
        " if len(attempt.token_ids) > len(self.spec.token_ids) else self.spec.sampling,",
        ("simulator",),
    ),
    Mutant(
        "messages of an earlier life of a worker are believed",
        "router.core.pool:WorkerPool.get",
        "self._workers.get(ref) if",
        "self.by_id(ref.worker_id) if",
        ("tests/router/core/test_core_faults.py::test_what_an_earlier_life_of_a_worker_says_is_not_believed",),
    ),
    Mutant(
        "another incarnation at the address is trusted",
        "kvtransfer.sender.session:SenderSession._handshake",
        "if got != self._target.peer:",
        "if False:",
        ("tests/kvtransfer/test_sessions.py::test_another_incarnation_at_the_address_is_not_trusted",),
    ),
    Mutant(
        "a link lost after the first tokens is not reported",
        "prefill_worker.core:PrefillCore._on_transfer_ended",
        "ended.outcome is TransferOutcome.LINK_LOST",
        "False",
        (
            "cluster: a session breaks",
            "tests/prefill_worker/test_core_ends.py::"
            "test_link_that_is_lost_after_the_first_tokens_is_told_as_the_decode_side_may_never_have_heard_of_it",
        ),
    ),
    Mutant(
        "a double free is accepted",
        "common.engine.kv.block_pool:BlockPool._drop_ref",
        'assert self._refs[kind][block] > 0, f"release of {kind.name} reference on block {block} that has none"',
        "if self._refs[kind][block] == 0: return",
        ("tests/common/engine/kv/test_block_pool.py::test_double_free_is_a_bug_and_leaves_no_alias",),
    ),
    Mutant(
        "a shared block is written without a copy",
        "common.engine.kv.block_pool:BlockPool.is_shared",
        "self.ref_count(block) > 1",
        "False",
        ("simulator",),
    ),
    Mutant(
        "the hash of a block ignores its last token",
        "common.values.hashing:extend_block_hashes",
        "data[offset : offset + stride]",
        "data[offset : offset + stride - 4]",
        (
            "tests/common/values/test_hashing.py::test_hash_covers_every_token_parent_salt_field_and_block_size",
            "simulator",
        ),
    ),
    Mutant(
        "held text is not shown at the end",
        "router.text.stop_strings:StopScanner.flush",
        'held, self._held = self._visible(self._held), ""',
        'held, self._held = "", ""',
        ("tests/router/text/test_stop_strings.py::test_held_text_is_shown_at_the_end",),
    ),
    Mutant(
        "readiness is always 200",
        "router.front.http.admin:AdminEndpoints.ready",
        "200 if readiness.is_ready else 503",
        "200",
        ("tests/router/front/test_http_admin.py::test_readiness_is_the_services",),
    ),
)


def plant(mutant: Mutant, patch: pytest.MonkeyPatch) -> None:
    """Rewrite the function, and wherever its module's tables name it. Fails when `old` is not there any more."""
    module_name, _, path = mutant.target.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    function = original.fget if isinstance(original, property) else original
    changed = _rewritten(function, mutant, vars(module))
    patch.setattr(owner, name, property(changed) if isinstance(original, property) else changed)
    for table_name, table in list(vars(module).items()):
        if isinstance(table, Mapping) and function in table.values():
            patch.setattr(module, table_name, {row: changed if f is function else f for row, f in table.items()})


def _rewritten(function: Any, mutant: Mutant, names: dict[str, Any]) -> Any:
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@property\n")
    assert source.count(mutant.old) == 1, f"{mutant.target} does not say {mutant.old!r} once"
    scope: dict[str, Any] = {}
    exec(compile(source.replace(mutant.old, mutant.new), mutant.target, "exec"), names, scope)
    return scope[function.__name__]


def pytest_configure() -> None:
    if (name := os.environ.get(PLANTED)) is not None:
        plant(next(mutant for mutant in MUTANTS if mutant.name == name), pytest.MonkeyPatch())
