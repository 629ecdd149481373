from common.cluster.prefix_index.breaker import CircuitBreaker


def test_stays_closed_below_the_limit_and_after_a_success() -> None:
    breaker = CircuitBreaker(max_failures=3, retry_after_s=1.0)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        assert breaker.allows(0.0)
        breaker.succeeded()
    assert not breaker.is_open


def test_lets_one_call_through_per_interval_while_open() -> None:
    breaker = CircuitBreaker(max_failures=3, retry_after_s=1.0)
    for _ in range(3):
        breaker.failed(10.0)
    assert [breaker.allows(now_s) for now_s in (10.0, 10.9, 11.0, 11.1, 11.9, 12.0)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_closes_when_the_trial_succeeds_and_reopens_when_it_fails() -> None:
    breaker = CircuitBreaker(max_failures=1, retry_after_s=1.0)
    breaker.failed(0.0)
    assert breaker.allows(1.0)
    breaker.failed(1.0)
    assert not breaker.allows(1.5)
    assert breaker.allows(2.0)
    breaker.succeeded()
    assert breaker.allows(2.0)
    assert breaker.allows(2.0)
