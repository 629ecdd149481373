from common.cores.draining import Draining


def test_it_is_over_once_when_there_is_nothing_left() -> None:
    draining = Draining()
    draining.request(10.0)
    assert not draining.ends(is_idle=False)
    assert draining.ends(is_idle=True)
    assert not draining.ends(is_idle=True)
    assert draining.is_requested
    assert draining.next_s() is None
    assert not draining.is_due(99.0)


def test_it_never_ends_unasked() -> None:
    draining = Draining()
    assert not draining.ends(is_idle=True)
    assert not draining.is_requested
    assert not draining.is_due(1e9)


def test_a_second_request_can_only_make_it_shorter() -> None:
    draining = Draining()
    draining.request(10.0)
    draining.request(20.0)
    assert draining.next_s() == 10.0
    draining.request(5.0)
    assert draining.is_due(5.0)
    assert not draining.is_due(4.9)
