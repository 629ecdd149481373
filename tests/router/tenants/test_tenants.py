"""Files of keys, salts, buckets and tenants, without a server."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from common.values.errors import InvalidApiKey, InvalidRequest, RateLimited
from common.values.hashing import block_hashes, hash_root
from deploy.cli.keys import hash_line, new_key
from router.tenants.access import Access, AdminKey
from router.tenants.key_file import InvalidKeyFile, KeyFile, derived_salt, hash_of, parse_key_file
from router.tenants.rate_limit import Bucket, duration_text
from router.tenants.tenants import Lease, Tenant, Tenants

SECRET = "ab" * 32
KEY = new_key()


def file_of(**tenants: dict[str, Any]) -> KeyFile:
    return parse_key_file(yaml.safe_dump({"cache_salt_secret": SECRET, "tenants": tenants}).encode())


def tenants_of(file: KeyFile, clock: Callable[[], float] = lambda: 0.0) -> Tenants:
    tenants = Tenants(16, clock=clock)
    tenants.update(file)
    return tenants


def place(tenant: Tenant, num_tokens: int) -> Lease:
    return tenant.take_places([num_tokens])[0]


# ---- the file ---------------------------------------------------------------------------------------


def test_yaml_and_json_are_read() -> None:
    line = hash_line(KEY)
    as_json = f'{{"cache_salt_secret": "{SECRET}", "tenants": {{"a": {{"keys": ["{line}"]}}}}}}'
    assert parse_key_file(as_json.encode()) == file_of(a={"keys": [line]})


def test_a_key_is_kept_as_nothing_but_its_hash() -> None:
    assert KEY not in hash_line(KEY)
    assert hash_line(KEY) == "sha256:" + hash_of(KEY.encode()).hex()
    assert len({new_key() for _ in range(100)}) == 100
    assert len(KEY) >= 40


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"a: \xff", "not YAML"),
        (b"tenants: [\n", "not YAML, line 2"),
        (b"- 1", "the file: "),
        (b"tenants: {}", "cache_salt_secret: "),
        (b"cache_salt_secret: short\ntenants: {}", "cache_salt_secret: "),
        (f"cache_salt_secret: {SECRET}\ntenants: {{a: {{keys: [{KEY}]}}}}".encode(), "tenants.a.keys.0: "),
        (f"cache_salt_secret: {SECRET}\ntenants: {{a: {{limit: 1}}}}".encode(), "tenants.a.limit: "),
        (f"cache_salt_secret: {SECRET}\ntenants: {{'a/b': {{}}}}".encode(), "tenants.a/b: "),
        (
            f"cache_salt_secret: {SECRET}\ntenants: {{a: {{limits: {{max_concurrent: true}}}}}}".encode(),
            "max_concurrent",
        ),
        (b"x" * (2 << 20), "larger than"),
        (b"a: &a [*b]", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_place_and_shows_no_secret(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidKeyFile) as caught:
        parse_key_file(data)
    assert problem in str(caught.value)
    assert KEY not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_no_two_tenants_share_a_key_and_the_refusal_does_not_show_it() -> None:
    line = hash_line(KEY)
    with pytest.raises(InvalidKeyFile, match="tenants a and b have a key in common") as caught:
        file_of(a={"keys": [line]}, b={"keys": [line]})
    assert line[7:] not in str(caught.value)


# ---- salts ------------------------------------------------------------------------------------------


def test_the_same_prompt_of_two_tenants_has_no_block_hash_in_common() -> None:
    file = file_of(a={}, b={})
    roots = [hash_root({"model": "m"}, 16, salt) for salt in (b"", file.cache_salt("a"), file.cache_salt("b"))]
    chains = [set(block_hashes(range(64), 16, root)) for root in roots]
    assert all(len(chain) == 4 for chain in chains)
    assert len(set.union(*chains)) == 12


def test_tenants_of_a_group_share_and_a_name_is_no_group() -> None:
    file = file_of(a={"cache_group": "shared"}, b={"cache_group": "shared"}, shared={}, c={"cache_group": "a"})
    assert file.cache_salt("a") == file.cache_salt("b")
    assert len({file.cache_salt(name) for name in ("a", "shared", "c")}) == 3


def test_a_salt_needs_the_secret() -> None:
    other = parse_key_file(yaml.safe_dump({"cache_salt_secret": "cd" * 32, "tenants": {"a": {}}}).encode())
    assert other.cache_salt("a") != file_of(a={}).cache_salt("a")


def test_fields_of_a_salt_cannot_run_into_one_another() -> None:
    fields = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")]
    assert len({derived_salt(b"s", *each) for each in fields}) == len(fields)


# ---- buckets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_over_any_time_no_more_passes_than_the_limit_allows(seed: int) -> None:
    chance, now_s, passed = random.Random(seed), 0.0, []
    bucket = Bucket(60, now_s)
    for _ in range(1000):
        now_s += chance.choice((0.0, 0.01, 0.5, 30.0)) * chance.random()
        if bucket.wait_s(1, now_s) == 0:
            bucket.take(1, now_s)
            passed.append(now_s)
    for start in passed:
        assert sum(start <= at_s < start + 60 for at_s in passed) <= 120  # a full bucket, and what comes meanwhile


def test_the_wait_is_exact() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    wait_s = bucket.wait_s(5, 0.0)
    assert wait_s == pytest.approx(5.0)
    assert bucket.wait_s(5, wait_s - 0.01) > 0
    assert bucket.wait_s(5, wait_s) == pytest.approx(0.0)


def test_more_than_the_bucket_holds_passes_when_it_is_full_and_is_paid_afterwards() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.wait_s(600, 0.0) == 0
    bucket.take(600, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(541.0)
    assert bucket.remaining(0.0) == 0


def test_a_new_limit_keeps_what_was_used() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(50, 0.0)
    assert bucket.resized(100, 0.0).remaining(0.0) == 50
    assert bucket.resized(20, 0.0).remaining(0.0) == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.0123, "13ms"), (1.0, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


# ---- tenants ----------------------------------------------------------------------------------------


def test_without_a_file_everybody_is_one_tenant_without_limits() -> None:
    tenant = Tenants().of(b"whatever")
    assert (tenant.is_anonymous, tenant.min_priority, tenant.headers()) == (True, -100, {})
    assert tenant.cache_salt("") == b""
    assert tenant.cache_salt("mine") == b"mine"


def test_a_file_without_tenants_lets_nobody_in() -> None:
    with pytest.raises(InvalidApiKey):
        tenants_of(file_of()).of(KEY.encode())


def test_hashes_that_begin_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {b"one": b"\x00" * 8 + b"1" * 24, b"two": b"\x00" * 8 + b"2" * 24, b"no": b"\x00" * 8 + b"3" * 24}
    monkeypatch.setattr("router.tenants.tenants.hash_of", digests.__getitem__)
    lines = {name: [f"sha256:{digests[name.encode()].hex()}"] for name in ("one", "two")}
    tenants = tenants_of(file_of(**{name: {"keys": keys} for name, keys in lines.items()}))
    assert [tenants.of(name).name for name in (b"one", b"two")] == ["one", "two"]
    with pytest.raises(InvalidApiKey):
        tenants.of(b"no")


def test_a_changed_file_changes_limits_and_keeps_what_is_used() -> None:
    line = hash_line(KEY)
    tenants = tenants_of(file_of(a={"keys": [line], "limits": {"requests_per_minute": 2, "max_concurrent": 1}}))
    tenant = tenants.of(KEY.encode())
    tenant.count_request()
    with place(tenant, 5):
        tenants.update(file_of(a={"keys": [line], "limits": {"requests_per_minute": 1, "max_concurrent": 2}}))
        assert tenants.of(KEY.encode()) is tenant
        with pytest.raises(RateLimited, match="limit 1 per minute"):
            tenant.count_request()
        with place(tenant, 5), pytest.raises(RateLimited, match="limit 2"):
            place(tenant, 5)
    assert (tenant.num_running, tenant.num_waiting) == (0, 0)


def test_a_refused_prompt_is_not_charged_and_the_log_says_whose_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    tenant = Tenant("a", file_of(a={"limits": {"tokens_per_minute": 100}}).tenants["a"], clock=lambda: 0.0)
    with place(tenant, 80) as lease:
        lease.charge(10)
        with pytest.raises(RateLimited, match="limit 100 per minute"):
            place(tenant, 30)
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "10"
    assert "tenant_limited" in (log := capsys.readouterr().out)
    assert "limit 100 per minute" in log


def test_output_is_charged_as_it_comes_and_once() -> None:
    """An answer that runs long counts against what its tenant asks for meanwhile; beyond the budget it is a debt."""
    tenant = Tenant("a", file_of(a={"limits": {"tokens_per_minute": 100}}).tenants["a"], clock=lambda: 0.0)
    with place(tenant, 10) as lease:
        for _ in range(8):
            lease.charge(10)
        assert tenant.headers()["x-ratelimit-remaining-tokens"] == "10"
        with pytest.raises(RateLimited, match="limit 100 per minute"):
            place(tenant, 11)
        lease.charge(40)
    with pytest.raises(RateLimited) as caught:
        place(tenant, 30)
    assert caught.value.retry_after_s == pytest.approx(36.0), "the debt of 30 and the prompt of 30"


def test_a_lease_counts_as_waiting_until_it_is_placed_once() -> None:
    tenant = Tenant("a")
    with place(tenant, 1) as lease, place(tenant, 1):
        assert tenant.num_waiting == 2
        lease.placed()
        lease.placed()
        assert (tenant.num_waiting, tenant.num_running) == (1, 2)
    assert (tenant.num_waiting, tenant.num_running) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ({"max_concurrent": 3}, [1, 1, 1]),
        ({"queue_share": 0.25}, [1, 1, 1, 1]),
        ({"tokens_per_minute": 100}, [40, 40, 11]),
    ],
)
def test_the_prompts_of_a_call_are_admitted_together_or_not_at_all(limits: dict[str, Any], lengths: list[int]) -> None:
    tenant = Tenant("a", file_of(a={"limits": limits}).tenants["a"], max_num_queued=16, clock=lambda: 0.0)
    with place(tenant, 10):
        before = tenant.headers(), tenant.num_running, tenant.num_waiting
        with pytest.raises(RateLimited):
            tenant.take_places(lengths)
        assert (tenant.headers(), tenant.num_running, tenant.num_waiting) == before
        leases = tenant.take_places(lengths[1:])
        assert tenant.num_running == len(lengths)
        for lease in leases:
            lease.release()
            lease.release()
    assert (tenant.num_waiting, tenant.num_running) == (0, 0)


def test_prompts_that_are_together_more_than_the_budget_pass_when_it_is_full() -> None:
    tenant = Tenant("a", file_of(a={"limits": {"tokens_per_minute": 100}}).tenants["a"], clock=lambda: 0.0)
    assert len(tenant.take_places([60, 60])) == 2
    with pytest.raises(RateLimited, match=r"try again in 12\.6s"):
        tenant.take_places([1])


def test_a_tenants_own_salt_stays_within_its_tenant() -> None:
    file = file_of(a={"may_salt": True}, b={"may_salt": True})
    a, b = (Tenant(name, file.tenants[name], file.cache_salt(name)) for name in ("a", "b"))
    salts = {tenant.cache_salt(stated) for tenant in (a, b) for stated in ("", "x", "y", "\udcff")}
    assert len(salts) == 8
    with pytest.raises(InvalidRequest):
        Tenant("c", file_of(c={}).tenants["c"]).cache_salt("x")


# ---- access -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], [b""], [KEY.encode(), KEY.encode()], [KEY.encode()[:-1]]])
def test_the_admin_key_is_compared_whole(given: list[bytes]) -> None:
    access = Access(Tenants(), AdminKey(KEY))
    with pytest.raises(InvalidApiKey) as caught:
        access.check_admin([], given)
    assert KEY not in str(caught.value)
    access.check_admin([], [KEY.encode()])
    access.check_admin([b"Bearer " + KEY.encode()], [])


def test_without_keys_of_any_kind_everything_is_open() -> None:
    access = Access(Tenants(), AdminKey(""))
    access.check_admin([], [])
    access.check_operator([], [])
    assert access.tenant([]).is_anonymous


def test_a_changed_admin_key_counts_at_once() -> None:
    admin_key = AdminKey("one")
    admin_key.update("two")
    assert (admin_key.matches(b"one"), admin_key.matches(b"two")) == (False, True)
