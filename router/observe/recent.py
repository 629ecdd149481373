"""What happened in the last minute, for people to look at: latencies, rates, transfers per pair. No IO.

Stands between the service and the metrics, remembers some of what passes and hands everything on. Bounded: latencies
are the newest of the window, counts are kept per second.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from router.observe.request_metrics import RouterMetrics

WINDOW_S = 60.0
# Rates that people watch live; a transfer is counted when it has ended.
RATE_WINDOW_S = 5.0
MAX_VALUES = 4096
MAX_PAIRS = 1024
# Failures that the client itself caused.
_BY_CLIENTS = frozenset({"request_cancelled"})


@dataclass(frozen=True, slots=True)
class TransferRate:
    """KV from one prefill worker to one decode worker."""

    prefill_worker_id: str
    decode_worker_id: str
    bytes_per_s: float
    num_handoffs: int  # of the window


@dataclass(frozen=True, slots=True)
class RecentView:
    """The last `window_s`; None = nothing was measured. `exposed_share`: of the transfer time, what nothing hid."""

    window_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    num_finished: int
    num_failed: int
    num_retries: int
    error_rate: float | None
    retry_rate: float | None
    prefix_hit_rate: float | None
    exposed_share: float | None
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    transfers: tuple[TransferRate, ...]


class Recent:
    """A `RouterMetrics` that remembers. Names that are not asked about only pass through."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._latencies = {name: _Latencies() for name in (_TTFT, _ITL)}
        self._counts = {name: _Count() for name in _COUNTED}
        self._pairs: dict[tuple[str, str], tuple[_Count, _Count]] = {}  # bytes, handoffs

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self._metrics.inc(name, amount, **labels)
        key = f"{name}:{labels.get('status', '')}" if name == "pdserve_requests" else name
        if key in self._counts and labels.get("error_type") not in _BY_CLIENTS:
            self._counts[key].add(self._clock(), amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._metrics.set(name, value, **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._metrics.observe(name, value, **labels)
        if name in self._latencies:
            self._latencies[name].add(self._clock(), value)
        elif name in self._counts:
            self._counts[name].add(self._clock(), value)

    def transferred(self, prefill_worker_id: str, decode_worker_id: str, num_bytes: int) -> None:
        """A prompt's KV has arrived."""
        now_s, pair = self._clock(), (prefill_worker_id, decode_worker_id)
        if pair not in self._pairs and len(self._pairs) >= MAX_PAIRS:
            self._forget_idle_pairs(now_s)
        if pair in self._pairs or len(self._pairs) < MAX_PAIRS:
            size, handoffs = self._pairs.setdefault(pair, (_Count(), _Count()))
            size.add(now_s, num_bytes)
            handoffs.add(now_s, 1)

    def view(self) -> RecentView:
        now_s = self._clock()
        self._forget_idle_pairs(now_s)
        count = {name: counted.total(now_s, WINDOW_S) for name, counted in self._counts.items()}
        ended = count[_FINISHED] + count[_FAILED]
        ttft, itl = self._latencies[_TTFT].sorted(now_s), self._latencies[_ITL].sorted(now_s)
        return RecentView(
            window_s=WINDOW_S,
            ttft_p50_s=quantile(ttft, 0.5),
            ttft_p99_s=quantile(ttft, 0.99),
            itl_p50_s=quantile(itl, 0.5),
            itl_p99_s=quantile(itl, 0.99),
            num_finished=int(count[_FINISHED]),
            num_failed=int(count[_FAILED]),
            num_retries=int(count[_RETRIES]),
            error_rate=_ratio(count[_FAILED], ended),
            retry_rate=_ratio(count[_RETRIES], ended),
            prefix_hit_rate=_ratio(count[_CACHED], count[_PROMPT]),
            exposed_share=_ratio(count[_EXPOSED], count[_TRANSFER]),
            prompt_tokens_per_s=self._counts[_PROMPT].total(now_s, RATE_WINDOW_S) / RATE_WINDOW_S,
            generation_tokens_per_s=self._counts[_GENERATED].total(now_s, RATE_WINDOW_S) / RATE_WINDOW_S,
            transfers=tuple(self._transfer_rate(pair, now_s) for pair in sorted(self._pairs)),
        )

    def _transfer_rate(self, pair: tuple[str, str], now_s: float) -> TransferRate:
        size, handoffs = self._pairs[pair]
        rate = size.total(now_s, RATE_WINDOW_S) / RATE_WINDOW_S
        return TransferRate(*pair, rate, int(handoffs.total(now_s, WINDOW_S)))

    def _forget_idle_pairs(self, now_s: float) -> None:
        self._pairs = {pair: counts for pair, counts in self._pairs.items() if counts[1].total(now_s, WINDOW_S)}


_TTFT = "pdserve_time_to_first_token_seconds"
_ITL = "pdserve_inter_token_latency_seconds"
_FINISHED, _FAILED = "pdserve_requests:finished", "pdserve_requests:failed"
_RETRIES = "pdserve_request_retries"
_PROMPT, _CACHED, _GENERATED = "pdserve_prompt_tokens", "pdserve_prompt_tokens_cached", "pdserve_generation_tokens"
_TRANSFER, _EXPOSED = "pdserve_kv_transfer_seconds", "pdserve_kv_transfer_exposed_seconds"
_COUNTED = (_FINISHED, _FAILED, _RETRIES, _PROMPT, _CACHED, _GENERATED, _TRANSFER, _EXPOSED)


def quantile(ordered: list[float], q: float) -> float | None:
    """The smallest value that a share of at least `q` does not exceed; None of nothing."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def _ratio(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


class _Latencies:
    """The newest values of the window."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, now_s: float, value: float) -> None:
        self._values.append((now_s, value))

    def sorted(self, now_s: float) -> list[float]:
        while self._values and self._values[0][0] < now_s - WINDOW_S:
            self._values.popleft()
        return sorted(value for _, value in self._values)


class _Count:
    """A sum per second of the window; the running second counts from its beginning."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float]] = deque(maxlen=int(WINDOW_S) + 1)

    def add(self, now_s: float, amount: float) -> None:
        second, before = int(now_s), 0.0
        if self._seconds and self._seconds[-1][0] == second:
            _, before = self._seconds.pop()
        self._seconds.append((second, before + amount))

    def total(self, now_s: float, window_s: float) -> float:
        return sum(amount for second, amount in self._seconds if second > now_s - window_s)
