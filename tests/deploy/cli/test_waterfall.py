from dataclasses import replace

import pytest

from deploy.cli.waterfall import Waterfall, render

EXAMPLE = Waterfall(
    route_s=0.010,
    queue_s=0.010,
    prefill_s=0.080,
    hidden_transfer_s=0.060,
    exposed_transfer_s=0.020,
    decode_queue_s=0.0,
    decode_s=0.280,
    first_token_s=0.100,
    kv_bytes=3_100_000,
    num_tokens=31,
)


def test_draws_each_phase_where_it_lies_in_time() -> None:
    assert render(EXAMPLE) == [
        "route        |█                                       |     10.0 ms",
        "queue        | █                                      |     10.0 ms",
        "prefill      |  ████████                              |     80.0 ms",
        "transfer     |    ░░░░░░██                            |     80.0 ms, 20.0 ms of it exposed, 3.1 MB",
        "decode queue |                                        |      0.0 ms",
        "decode       |            ████████████████████████████|    280.0 ms",
        "total 400.0 ms, first token after 100.0 ms, then 100.0 tokens/s",
    ]


def test_the_parts_add_up_to_the_wall_time() -> None:
    assert EXAMPLE.wall_s == pytest.approx(0.4)


def test_a_phase_too_short_to_draw_still_leaves_a_mark() -> None:
    lines = render(replace(EXAMPLE, route_s=0.0001, decode_queue_s=0.0001))
    assert lines[0].startswith("route        |▏")
    assert "▏" in lines[4]


def test_a_request_without_a_transfer_says_so() -> None:
    lines = render(replace(EXAMPLE, hidden_transfer_s=0.0, exposed_transfer_s=0.0, kv_bytes=0))
    assert lines[3].endswith("none: prefilled where it is decoded")


def test_all_bars_are_equally_wide_whatever_the_numbers() -> None:
    for scale in (0.0, 1e-9, 1.0, 1e6):
        scaled = replace(
            EXAMPLE,
            **{name: getattr(EXAMPLE, name) * scale for name in Waterfall.__slots__ if name.endswith("_s")},
        )
        widths = {len(line.split("|")[1]) for line in render(scaled)[:-1]}
        assert widths == {40}


def test_one_token_has_no_rate() -> None:
    assert "tokens/s" not in render(replace(EXAMPLE, num_tokens=1))[-1]
