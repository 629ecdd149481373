"""Who the clients are: each tenant with its rights, its limits and what it uses of them now. Of one event loop.

Owns the use of every tenant. Limits are counted by each router for itself: nothing is asked over the network for a
request, and with N routers behind one address a tenant can have up to N times its limits.
"""

import hmac
import time
from collections.abc import Callable, Sequence

from common.telemetry.logs import get_logger
from common.values.errors import InvalidApiKey, InvalidRequest, RateLimited
from router.observe.request_metrics import NullMetrics, RouterMetrics
from router.tenants.key_file import HASH_PREFIX, KeyFile, TenantLimits, TenantSettings, derived_salt, hash_of
from router.tenants.rate_limit import Bucket, duration_text

_NO_METRICS = NullMetrics()
_INDEX_BYTES = 8
# When a running request will end is not known; most clients double their waits anyway.
_CONCURRENCY_RETRY_S = 1.0
_NO_LIMITS = TenantLimits()
# Without a file of keys everybody is this one tenant: no limits, the cache salt is the client's own affair.
_EVERYBODY = TenantSettings(may_salt=True, min_priority=-100)


class Lease:
    """The place of one prompt, until `release` or the end of its `with`."""

    __slots__ = ("_is_held", "_is_waiting", "_tenant")

    def __init__(self, tenant: "Tenant") -> None:
        self._tenant = tenant
        self._is_held = self._is_waiting = True
        tenant.num_running += 1
        tenant.num_waiting += 1

    def placed(self) -> None:
        """Workers have been found: it waits no longer. Idempotent."""
        if self._is_waiting:
            self._is_waiting = False
            self._tenant.num_waiting -= 1

    def charge(self, num_tokens: int) -> None:
        """Output has come. Paid for at once: what runs long counts against what is asked for meanwhile."""
        self._tenant.charge_output(num_tokens)

    def release(self) -> None:
        """The prompt is answered, or will not be. Idempotent."""
        if self._is_held:
            self._is_held = False
            self.placed()
            self._tenant.num_running -= 1

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Tenant:
    """One client organisation. Changed only by its own methods; a changed file of keys replaces its settings."""

    def __init__(
        self,
        name: str,
        settings: TenantSettings = _EVERYBODY,
        salt: bytes = b"",
        max_num_queued: int = 0,
        metrics: RouterMetrics = _NO_METRICS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._max_num_queued = max_num_queued
        self._metrics = metrics
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.num_running = 0
        self.num_waiting = 0  # of those: no workers yet
        self.update(settings, salt)

    def update(self, settings: TenantSettings, salt: bytes) -> None:
        """New settings; what is used stays used."""
        self._settings, self._salt, self._limits = settings, salt, settings.limits
        now_s = self._clock()
        self._requests = _resized(self._requests, self._limits.requests_per_minute, now_s)
        self._tokens = _resized(self._tokens, self._limits.tokens_per_minute, now_s)
        self.has_limits = self._limits != _NO_LIMITS

    @property
    def is_anonymous(self) -> bool:
        return not self.name

    @property
    def min_priority(self) -> int:
        return self._settings.min_priority

    @property
    def _max_waiting(self) -> int | None:
        """None = as many as the router lets wait."""
        share = self._limits.queue_share
        return max(1, int(share * self._max_num_queued)) if share < 1.0 else None

    def cache_salt(self, stated: str) -> bytes:
        """The salt of a request's blocks. Raises InvalidRequest when the client may not divide the cache itself."""
        if not stated:
            return self._salt
        if not self._settings.may_salt:
            raise InvalidRequest("cache_salt is set by the server, by your key", param="cache_salt")
        return stated.encode() if self.is_anonymous else derived_salt(self._salt, "cache_salt", stated)

    def count_request(self) -> None:
        """One more call. Raises RateLimited."""
        if self._requests is None:
            return
        now_s = self._clock()
        wait_s = self._requests.wait_s(1, now_s)
        if wait_s > 0:
            raise self._refusal(f"requests: limit {self._requests.per_minute} per minute", wait_s)
        self._requests.take(1, now_s)

    def check_prompts(self, num_prompts: int) -> None:
        """Of one call. Raises InvalidRequest for more than may ever be answered at a time: waiting would not help."""
        bounds = (self._limits.max_concurrent, self._max_waiting)
        most = min((bound for bound in bounds if bound is not None), default=num_prompts)
        if num_prompts > most:
            raise InvalidRequest(f"prompt holds {num_prompts} prompts, your limit is {most} at a time", param="prompt")

    def check_places(self, num_prompts: int = 1) -> None:
        """Whether so many more find a place; ask before the work of reading them as well. Raises RateLimited."""
        most = self._limits.max_concurrent
        if most is not None and self.num_running + num_prompts > most:
            raise self._refusal(f"concurrent requests: limit {most}", _CONCURRENCY_RETRY_S)
        if self._max_waiting is not None and self.num_waiting + num_prompts > self._max_waiting:
            raise self._refusal(f"waiting requests: limit {self._max_waiting}", _CONCURRENCY_RETRY_S)

    def take_places(self, lengths: Sequence[int]) -> list[Lease]:
        """A place for each prompt of a call, whose tokens are charged: for all, or RateLimited is raised."""
        if self.has_limits:
            self.check_places(len(lengths))
            self._charge(sum(lengths))
        return [Lease(self) for _ in lengths]

    def charge_output(self, num_tokens: int) -> None:
        """What has been generated is paid for, if with a debt: a running request is never ended for it."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """What is left, under the names that OpenAI's clients know."""
        if not self.has_limits:
            return {}
        now_s = self._clock()
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining(now_s))
                headers[f"x-ratelimit-reset-{kind}"] = duration_text(bucket.reset_s(now_s))
        return headers

    def _charge(self, num_prompt_tokens: int) -> None:
        """Raises RateLimited when the budget does not hold the prompts of a call."""
        if self._tokens is None:
            return
        now_s = self._clock()
        wait_s = self._tokens.wait_s(num_prompt_tokens, now_s)
        if wait_s > 0:
            raise self._refusal(f"tokens: limit {self._tokens.per_minute} per minute", wait_s)
        self._tokens.take(num_prompt_tokens, now_s)

    def _refusal(self, what: str, wait_s: float) -> RateLimited:
        self._metrics.inc("pdserve_requests", status="refused", error_type=RateLimited.code)
        get_logger().info("tenant_limited", tenant=self.name, reached=what)
        return RateLimited(f"rate limit reached for {what}; try again in {duration_text(wait_s)}", retry_after_s=wait_s)


class Tenants:
    """Finds the tenant of a key. Without `update` there are no keys, and everybody is the anonymous tenant."""

    def __init__(
        self,
        max_num_queued: int = 0,
        metrics: RouterMetrics = _NO_METRICS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_num_queued = max_num_queued
        self._metrics = metrics
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        self._by_hash: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        self._anonymous: Tenant | None = Tenant("")

    @property
    def are_open(self) -> bool:
        """No key is needed."""
        return self._anonymous is not None

    def update(self, file: KeyFile) -> None:
        """From now on these keys count and no others; requests that are running go on."""
        self._anonymous = None
        tenants = {
            name: self._updated(name, settings, file.cache_salt(name)) for name, settings in file.tenants.items()
        }
        by_hash: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        for name, text in file.key_hashes():
            digest = bytes.fromhex(text.removeprefix(HASH_PREFIX))
            by_hash.setdefault(digest[:_INDEX_BYTES], []).append((digest, tenants[name]))
        self._tenants, self._by_hash = tenants, by_hash
        num_keys = sum(map(len, by_hash.values()))
        get_logger().info("api_keys_read", num_tenants=len(tenants), num_keys=num_keys)

    def of(self, key: bytes) -> Tenant:
        """The tenant with this key. Raises InvalidApiKey.

        One look-up by the first bytes of the hash, then the whole hash in constant time. What the look-up's time
        could tell are bits of a hash, and a hash does not lead to its key.
        """
        if self._anonymous is not None:
            return self._anonymous
        digest = hash_of(key)
        for known, tenant in self._by_hash.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(known, digest):
                return tenant
        raise InvalidApiKey("the API key is not known")

    def _updated(self, name: str, settings: TenantSettings, salt: bytes) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            return Tenant(name, settings, salt, self._max_num_queued, self._metrics, self._clock)
        tenant.update(settings, salt)
        return tenant


def _resized(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    return bucket if bucket.per_minute == per_minute else bucket.resized(per_minute, now_s)
