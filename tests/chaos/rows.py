"""The fault list, as data: a row of the fault matrix, what is done, how it is proven, and what must come of it."""

import signal

from tests.chaos.faults import (
    DECODING,
    PREFILLING,
    RESERVED,
    TRANSFERRING,
    freeze_for_good,
    freeze_worker,
    kill_queued,
    kill_rank,
    kill_worker,
    signal_router,
    slow_worker,
    wedge_router,
    wedge_worker,
)
from tests.chaos.link_faults import drop_link, drop_router_link, reset_link, slow_link
from tests.chaos.outer_faults import (
    exhausted_pool,
    few_descriptors,
    full_log_disk,
    hogs,
    leaving_clients,
    scale_in,
    second_router,
    slow_readers,
)
from tests.chaos.planted_rows import PLANTED_ROWS
from tests.chaos.redis_rows import REDIS_ROWS
from tests.chaos.rig import Shape
from tests.chaos.row import ENDED_CLEANLY, UNNOTICED, Row

# One worker of each role: its replacement is what requests wait for, and takes its time where cores are few.
OF_TWO_RANKS = Shape(
    1,
    1,
    (
        ("router", "pair_grace_s", 60.0),
        ("prefill_worker", "tensor_parallel_size", 2),
        ("decode_worker", "tensor_parallel_size", 2),
    ),
)
ROUTER_GONE = "clients get an error or a broken connection; a new router serves; every block is free"

ROWS: tuple[Row, ...] = (
    Row(
        "router-terminated",
        1,
        "router",
        "SIGTERM",
        "decoding",
        "what ends within the grace is right, the rest gets an error; a new router serves",
        "the process is gone",
        signal_router(signal.SIGTERM),
        allowed=ENDED_CLEANLY,
    ),
    Row(
        "router-killed",
        3,
        "router",
        "SIGKILL",
        "all phases",
        ROUTER_GONE,
        "the process is gone",
        signal_router(signal.SIGKILL),
        allowed=ENDED_CLEANLY,
        is_short=True,
    ),
    Row(
        "router-blocked",
        4,
        "router",
        "SIGSTOP 2 s",
        "decoding",
        "no worker is given up; every answer is right",
        "state T",
        wedge_router(2.0),
    ),
    *(
        Row(
            f"prefill-killed-{moment}",
            6,
            "prefill worker",
            "SIGKILL",
            moment,
            UNNOTICED,
            "its audit showed the moment; the process is gone",
            act,
            is_short=moment == "computing",
        )
        for moment, act in (
            ("queued", kill_queued("prefill")),
            ("computing", kill_worker("prefill", PREFILLING)),
            ("transferring", kill_worker("prefill", TRANSFERRING)),
        )
    ),
    Row(
        "prefill-frozen",
        7,
        "prefill worker",
        "SIGSTOP 8 s",
        "computing",
        "given up by its silence; every answer is right; comes back as a new incarnation",
        "state T",
        freeze_worker("prefill", PREFILLING, 8.0),
    ),
    Row(
        "prefill-slow",
        10,
        "prefill worker",
        "runs a tenth of the time for 8 s",
        "steady",
        UNNOTICED,
        "state T, many times",
        slow_worker("prefill", 8.0),
    ),
    Row(
        "handoff-deaf",
        11,
        "handoff",
        "all packets of a pair dropped for 6 s",
        "moving KV",
        "given up at the link's time-out, done again; every answer is right",
        "TCP retransmits",
        drop_link("both", 6.0),
        is_short=True,
    ),
    Row(
        "handoff-slow",
        12,
        "handoff",
        "KV connections limited to 200 kB/s for 8 s",
        "steady",
        "no inner time-out; every answer is right",
        "the kernel's pacing rate",
        slow_link(200_000, 8.0),
    ),
    *(
        Row(
            f"handoff-reset-{link}",
            13,
            "handoff",
            f"RST on the {link} connections of a pair",
            "moving KV",
            UNNOTICED,
            "connections reset",
            reset_link(link),
            is_short=link == "kv",
        )
        for link in ("control", "kv")
    ),
    Row(
        "handoff-one-way",
        14,
        "handoff",
        "packets to the prefill worker dropped for 6 s",
        "moving KV",
        "every answer is right; no block stays held",
        "TCP retransmits",
        drop_link("prefill", 6.0),
    ),
    *(
        Row(
            f"decode-killed-{moment}",
            16,
            "decode worker",
            "SIGKILL",
            moment,
            "a pause, then the same tokens",
            "its audit showed the moment; the process is gone",
            kill_worker("decode", phases),
            is_short=moment == "decoding",
        )
        for moment, phases in (("transferring", RESERVED), ("decoding", DECODING))
    ),
    *(
        Row(
            f"rank-killed-{moment}",
            number,
            f"a rank of the {role} worker",
            "SIGKILL",
            moment,
            "its worker ends and is replaced; a pause, then the same tokens",
            "its audit showed the moment; rank and worker are gone",
            kill_rank(role, phases),
            shape=OF_TWO_RANKS,
        )
        for moment, number, role, phases in (
            ("computing", 6, "prefill", PREFILLING),
            ("transferring", 6, "prefill", TRANSFERRING),
            ("decoding", 16, "decode", DECODING),
        )
    ),
    Row(
        "decode-frozen",
        20,
        "decode worker",
        "SIGSTOP 8 s",
        "decoding",
        "given up by its silence; every answer is right; comes back as a new incarnation",
        "state T",
        freeze_worker("decode", DECODING, 8.0),
    ),
    Row(
        "decode-frozen-for-good",
        20,
        "decode worker",
        "SIGSTOP, never SIGCONT",
        "decoding",
        "given up by its silence; killed and replaced by the pool; every answer is right",
        "state T, then the process is gone",
        freeze_for_good("decode", DECODING),
    ),
    Row(
        "router-link-deaf",
        20,
        "router-worker link",
        "all packets dropped for 6 s",
        "decoding",
        "given up by its silence; every answer is right",
        "TCP retransmits",
        drop_router_link("decode", 6.0),
    ),
    Row(
        "log-disk-full",
        30,
        "host",
        "no byte more in any log file for 6 s",
        "steady",
        UNNOTICED,
        "the router's log does not grow",
        full_log_disk(6.0),
    ),
    Row(
        "few-descriptors",
        31,
        "host",
        "the router has 20 descriptors left, 60 connections come",
        "steady",
        "running requests are right; what does not get in is refused or waits; afterwards all is well",
        "descriptors in use",
        few_descriptors(20, 60),
        allowed=ENDED_CLEANLY,
    ),
    Row(
        "decode-scaled-in",
        33,
        "operator",
        "the decode pool shrinks to 1 and grows to 2",
        "decoding",
        UNNOTICED,
        "the workers that left",
        scale_in("decode"),
    ),
    Row(
        "slow-readers",
        34,
        "clients",
        "8 clients with small buffers read nothing for 5 s",
        "decoding",
        "they get everything afterwards; no other client waits",
        "nothing was read",
        slow_readers(8, 5.0),
    ),
    Row(
        "clients-leave",
        35,
        "clients",
        "30 clients leave at random moments",
        "any",
        "their blocks are free at once; every answer is right",
        "answers that were not complete",
        leaving_clients(30),
    ),
    Row(
        "second-router",
        5,
        "router",
        "another router joins, serves 40 requests, and leaves",
        "steady",
        "both serve; every answer is right",
        "two routers answered",
        second_router(40),
    ),
    Row(
        "decode-wedged",
        18,
        "decode worker",
        "its compute thread stands still",
        "decoding",
        "it ends by itself after max_step_s and is replaced; every answer is right",
        "the thread's state, the end of the process",
        wedge_worker("decode"),
    ),
    Row(
        "decode-pool-exhausted",
        19,
        "decode worker",
        "72 blocks, sequences of up to 67",
        "decoding",
        "sequences are put back and go on; every answer is right",
        "its count of preemptions",
        exhausted_pool(),
        shape=Shape(1, 1, (("decode_worker", "num_blocks", 72),)),
    ),
    Row(
        "host-busy",
        29,
        "host",
        "two processor hogs for 8 s",
        "steady",
        "no false death; every answer is right",
        "processor time of the hogs",
        hogs(2, 8.0),
    ),
    *REDIS_ROWS,
    *PLANTED_ROWS,
)


def rows_named(names: str) -> tuple[Row, ...]:
    """By name, by number, or by the beginning of a name; comma-separated."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    found = tuple(row for row in ROWS if any(row.name.startswith(name) or str(row.number) == name for name in wanted))
    if not found:
        raise SystemExit(f"no such row: {names}; there are {', '.join(row.name for row in ROWS)}")
    return found
