"""Decides how many workers each pool should have, from how loaded its workers are. Pure: no IO.

Load is expressed as a *need*: how many workers, as a fraction, would carry it with room to spare.

    prefill   uncached tokens waiting / (speed of a worker x TTFT target)  +  busy workers / 0.8
    decode    the largest of  KV blocks in use / (0.8 x blocks of a worker),
                              sequences / (0.9 x max_num_seqs),
                              step time / TPOT target x workers, at most one worker more than there are

A pool grows when the need exceeded its size during the whole `up_window_s`: a spike is over before that. It grows to
the median of that window: what a backlog needs grows while it waits, and its least is its beginning. It shrinks
when the need, with a quarter added, stayed below its size during the whole `stable_window_s`. After a change, a pool
rests for a cooldown. While workers that were asked for are not ready, nothing is added: their load is not taken off
the others yet. Time is seconds, never a number of looks; a gap in the looks starts the windows anew.

No data is not idle: while a worker of a pool does not report, or reports what cannot be, the pool needs at least what
it has. It does not shrink and gives nothing, and says that it is blind.

Where the total is limited and reached, a pool that must grow takes workers from the other if that could do without
them on the mean of `shift_window_s`, with the same margin: they change their role. Both pools then rest.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace

from common.values.config import AutoscaleSettings
from common.values.messages import Role
from deploy.scaling.autoscale_mix import Decision, Spare, within_total

BUSY_TARGET = 0.8
BLOCKS_TARGET = 0.8
SEQS_TARGET = 0.9
# Need is multiplied by this before a pool may shrink: what just fitted after the change would grow it again.
SHRINK_MARGIN = 1.25
MAX_GAP_S = 10.0
MAX_SAMPLES = 4096
NUM_REMEMBERED = 10


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One ready worker: `num_blocks_used` are referenced or held, `step_s` and `tokens_per_s` 0 = not measured."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks_used: int = 0
    num_blocks: int = 0
    max_num_seqs: int = 0
    tokens_per_s: float = 0.0
    step_s: float = 0.0

    @property
    def is_plausible(self) -> bool:
        """False for numbers that no worker has."""
        values = astuple(self)
        return all(math.isfinite(value) and value >= 0 for value in values) and self.num_blocks_used <= self.num_blocks


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool at one moment. `size`: workers that are asked for. `num_queued`: requests without a place, of decode."""

    size: int
    workers: tuple[WorkerLoad, ...]
    num_queued: int = 0

    @property
    def blindness(self) -> str:
        """What is not known of the pool; empty = all of it is."""
        if self.num_queued < 0:
            return f"blind: {self.num_queued} requests queue"
        if (num_known := len(self.plausible.workers)) < self.size:
            return f"blind: {num_known} of {self.size} workers report"
        return ""

    @property
    def plausible(self) -> "PoolLoad":
        """Without the workers whose numbers cannot be."""
        workers = tuple(worker for worker in self.workers if worker.is_plausible)
        return replace(self, workers=workers, num_queued=max(0, self.num_queued))


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed something, as operators see it later."""

    at_s: float
    from_size: int
    to_size: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Need:
    workers: float
    cause: str


@dataclass(slots=True)
class _Pool:
    """What is remembered of one pool: its need over the longest window, and its last changes."""

    needs: deque[tuple[float, _Need]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    decision: Decision | None = None
    watched_since_s: float = 0.0

    def note(self, need: _Need, now_s: float, window_s: float) -> None:
        if not self.needs or now_s - self.needs[-1][0] > MAX_GAP_S:
            self.needs.clear()
            self.watched_since_s = now_s
        self.needs.append((now_s, need))
        while self.needs[0][0] < now_s - window_s:
            self.needs.popleft()

    def over(self, window_s: float, now_s: float) -> list[_Need]:
        """The needs of the window; empty when it was not watched for so long."""
        if now_s - self.watched_since_s < window_s:
            return []
        return [need for at_s, need in self.needs if at_s >= now_s - window_s]

    def rested_s(self, now_s: float) -> float:
        return now_s - self.changes[-1].at_s if self.changes else math.inf


class Autoscaler:
    """Owns the history of both pools' need. Give it every load, once a second or so."""

    def __init__(self, settings: AutoscaleSettings) -> None:
        self._settings = settings
        self._pools = {role: _Pool() for role in Role}

    def decide_both(self, loads: Mapping[Role, PoolLoad], now_s: float) -> dict[Role, Decision]:
        """Take in both pools' loads; answers the sizes they should have. Changes are taken for done, both at once."""
        wanted = {role: self._wanted(role, loads[role], now_s) for role in Role}
        spares = {role: self._spare(role, loads[role], now_s) for role in Role}
        within = within_total(wanted, spares, self._settings.total_min, self._settings.total_max)
        return {role: self._noted(within[role], now_s) for role in Role}

    def decide(self, role: Role, load: PoolLoad, now_s: float) -> Decision:
        """The same for one pool alone, whatever the total."""
        return self._noted(self._wanted(role, load, now_s), now_s)

    def _wanted(self, role: Role, load: PoolLoad, now_s: float) -> Decision:
        pool, settings = self._pools[role], self._settings
        known = load.plausible
        need = self._prefill_need(known.workers) if role is Role.PREFILL else self._decode_need(known)
        if load.blindness:
            need = _Need(max(need.workers, float(load.size)), f"{load.blindness}; {need.cause}")
        pool.note(need, now_s, max(settings.stable_window_s, settings.up_window_s, settings.shift_window_s))
        desired, reason = self._desired(role, load, pool, now_s)
        return Decision(role, load.size, desired, round(need.workers, 3), reason)

    def _noted(self, decision: Decision, now_s: float) -> Decision:
        pool = self._pools[decision.role]
        pool.decision = decision
        if decision.is_change:
            pool.changes.append(Change(now_s, decision.size, decision.desired, decision.reason))
        return decision

    def _spare(self, role: Role, load: PoolLoad, now_s: float) -> Spare:
        """What the pool could give to the other, and the reason."""
        pool, settings = self._pools[role], self._settings
        needs = pool.over(settings.shift_window_s, now_s)
        if load.blindness:
            return Spare(0, load.blindness)
        if not needs:
            return Spare(0, f"it has not been watched for {settings.shift_window_s:g} s")
        need = _mean([need.workers for need in needs])
        kept = max(_ceil(need * SHRINK_MARGIN), self._limits(role)[0])
        text = f"{need:.1f} needed on the mean of {settings.shift_window_s:g} s"
        if load.size <= kept:
            return Spare(0, text)
        if (rest_s := settings.down_cooldown_s - pool.rested_s(now_s)) > 0:
            return Spare(0, f"it rests for {rest_s:.0f} s")
        return Spare(load.size - kept, text)

    def status(self, now_s: float) -> dict[str, dict[str, object]]:
        """Per pool: the last decision with its reason, and the last changes, newest first."""
        return {role.value: _status(pool, now_s) for role, pool in self._pools.items() if pool.decision is not None}

    def _limits(self, role: Role) -> tuple[int, int]:
        settings = self._settings
        if role is Role.PREFILL:
            return settings.prefill_min, settings.prefill_max
        return settings.decode_min, settings.decode_max

    def _desired(self, role: Role, load: PoolLoad, pool: _Pool, now_s: float) -> tuple[int, str]:
        low, high = self._limits(role)
        if not low <= load.size <= high:
            return min(max(load.size, low), high), f"{load.size} is outside the limits {low} to {high}"
        up = pool.over(self._settings.up_window_s, now_s)
        least = min(up, key=_workers, default=None)
        if least is not None and _ceil(least.workers) > load.size:
            return self._grown(load, pool, _middle(up), high, now_s)
        stable = pool.over(self._settings.stable_window_s, now_s)
        most = max(stable, key=_workers, default=None)
        if most is not None and _ceil(most.workers * SHRINK_MARGIN) < load.size:
            return self._shrunk(load, pool, most, low, now_s)
        now = pool.needs[-1][1]
        if load.blindness:
            return load.size, f"held, {now.cause}"
        if _ceil(now.workers) > load.size:
            return load.size, f"more if it lasts for {self._settings.up_window_s:g} s: {now.cause}"
        return load.size, f"{load.size} fits: {now.cause}"

    def _grown(self, load: PoolLoad, pool: _Pool, need: _Need, high: int, now_s: float) -> tuple[int, str]:
        desired = min(_ceil(need.workers), high)
        if desired == load.size:
            return load.size, f"at the limit of {high} although more are needed: {need.cause}"
        if (num_missing := load.size - len(load.plausible.workers)) > 0:
            return load.size, f"waiting for {num_missing} to get ready; then more: {need.cause}"
        if (rest_s := self._settings.up_cooldown_s - pool.rested_s(now_s)) > 0:
            return load.size, f"growing in {rest_s:.0f} s: {need.cause}"
        return desired, f"for {self._settings.up_window_s:g} s at least: {need.cause}"

    def _shrunk(self, load: PoolLoad, pool: _Pool, need: _Need, low: int, now_s: float) -> tuple[int, str]:
        desired = max(_ceil(need.workers * SHRINK_MARGIN), low)
        if desired == load.size:
            return load.size, f"at the limit of {low}: {need.cause}"
        if (rest_s := self._settings.down_cooldown_s - pool.rested_s(now_s)) > 0:
            return load.size, f"shrinking in {rest_s:.0f} s: {need.cause}"
        return desired, f"for {self._settings.stable_window_s:g} s at most: {need.cause}"

    def _prefill_need(self, workers: Sequence[WorkerLoad]) -> _Need:
        num_tokens = sum(worker.num_waiting_tokens for worker in workers)
        num_busy = sum(worker.num_running + worker.num_waiting > 0 for worker in workers)
        speed = _mean([worker.tokens_per_s for worker in workers if worker.tokens_per_s > 0])
        target_s = self._settings.target_ttft_s
        backlog = num_tokens / (speed * target_s) if speed else 0.0
        return _Need(
            backlog + num_busy / BUSY_TARGET,
            f"{num_tokens} uncached tokens wait at {speed:.0f} tokens/s a worker for a TTFT of {target_s:g} s, "
            f"{num_busy} of {len(workers)} busy",
        )

    def _decode_need(self, load: PoolLoad) -> _Need:
        workers = load.workers
        num_seqs = load.num_queued + sum(worker.num_running + worker.num_waiting for worker in workers)
        max_num_seqs = _mean([worker.max_num_seqs for worker in workers])
        num_used = sum(worker.num_blocks_used for worker in workers)
        num_blocks = _mean([worker.num_blocks for worker in workers])
        needs = [_Need(0.0, "idle")]
        if max_num_seqs and num_seqs:
            text = f"{num_seqs} sequences, {load.num_queued} of them queued, for {max_num_seqs:.0f} a worker"
            needs.append(_Need(num_seqs / (SEQS_TARGET * max_num_seqs), text))
        if num_blocks and num_used:
            text = f"{num_used} KV blocks in use of {num_blocks:.0f} a worker"
            needs.append(_Need(num_used / (BLOCKS_TARGET * num_blocks), text))
        return max([*needs, *self._step_need(workers)], key=_workers)

    def _step_need(self, workers: Sequence[WorkerLoad]) -> list[_Need]:
        """Smaller batches are faster, but not in proportion: one worker more at a time, none for batches of 1."""
        batches = [worker for worker in workers if worker.num_running > 1 and worker.step_s > 0]
        if not batches:
            return []
        step_s, target_s = _mean([worker.step_s for worker in batches]), self._settings.target_tpot_s
        need = min(len(batches) * step_s / target_s, len(workers) + 1.0)
        return [_Need(need, f"a token takes {step_s * 1000:.0f} ms for a TPOT of {target_s * 1000:.0f} ms")]


def _status(pool: _Pool, now_s: float) -> dict[str, object]:
    assert pool.decision is not None
    changes = [
        {
            "age_s": round(now_s - change.at_s, 1),
            "from": change.from_size,
            "to": change.to_size,
            "reason": change.reason,
        }
        for change in reversed(pool.changes)
    ]
    return {**asdict(pool.decision), "changes": changes}


def _workers(need: _Need) -> float:
    return need.workers


def _middle(needs: Sequence[_Need]) -> _Need:
    """The median: a backlog that grows through the window tells more than its beginning, one spike tells nothing."""
    return sorted(needs, key=_workers)[len(needs) // 2]


def _ceil(need: float) -> int:
    """Whole workers; what exceeds by less than a hundredth is a rounding error."""
    return math.ceil(need - 0.01)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
