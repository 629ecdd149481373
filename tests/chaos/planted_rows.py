"""Rows of the fault list whose fault comes from inside a process, or from those who manage processes."""

import signal

from tests.chaos.faults import signal_router_amid_prefill
from tests.chaos.link_faults import deafen_rendezvous
from tests.chaos.managing_faults import join_with_other_weights, kill_ray_control
from tests.chaos.planted_faults import (
    break_a_layer,
    die_at,
    disorder_the_link,
    kill_actor,
    shift_clock,
    spoil_a_row,
    too_few_blocks,
)
from tests.chaos.rig import Shape
from tests.chaos.row import ENDED_CLEANLY, UNNOTICED, Row

INSTRUMENTED = Shape(2, 2, is_instrumented=True)
REPORTED = frozenset({"error"})

PLANTED_ROWS: tuple[Row, ...] = (
    Row(
        "router-killed-prefilling",
        2,
        "router",
        "SIGKILL",
        "computing",
        "workers drop its requests within 2 s; a new router serves",
        "the process is gone; the workers' audits",
        signal_router_amid_prefill(signal.SIGKILL, within_s=2.0),
        allowed=ENDED_CLEANLY,
    ),
    *(
        Row(
            f"prefill-killed-{moment}",
            6,
            "prefill worker",
            "SIGKILL, by itself",
            words,
            UNNOTICED,
            "its own note; the process is gone",
            die_at("prefill", moment),
            shape=INSTRUMENTED,
        )
        for moment, words in (
            ("sending", "the first chunk of a transfer has gone"),
            ("acknowledged", "a transfer was acknowledged"),
        )
    ),
    Row(
        "prefill-layer-fails",
        8,
        "prefill worker",
        "an exception in a layer",
        "computing",
        "the worker lives; every answer is right",
        "the plant acted once",
        break_a_layer(),
        shape=INSTRUMENTED,
    ),
    Row(
        "prefill-pool-exhausted",
        9,
        "prefill worker",
        "64 blocks, prompts of up to 57",
        "queued",
        "prompts wait; every answer is right",
        "allocations that were refused",
        too_few_blocks(),
        shape=Shape(1, 1, (("prefill_worker", "num_blocks", 64),), is_instrumented=True),
    ),
    Row(
        "handoff-disordered",
        15,
        "handoff",
        "6 messages come twice, 6 pairs change places",
        "moving KV",
        "refused and done again; every answer is right",
        "the plant counted them",
        disorder_the_link(6, 6),
        shape=INSTRUMENTED,
    ),
    Row(
        "decode-killed-admitting",
        16,
        "decode worker",
        "SIGKILL, by itself",
        "all KV was received, no token yet",
        "a pause, then the same tokens",
        "its own note; the process is gone",
        die_at("decode", "admitting"),
        shape=INSTRUMENTED,
    ),
    Row(
        "decode-row-spoiled",
        17,
        "decode worker",
        "the logits of one row are not finite",
        "decoding",
        "that client gets an error; every other answer is right",
        "the plant acted once",
        spoil_a_row(2),
        shape=INSTRUMENTED,
        allowed=REPORTED,
    ),
    Row(
        "rendezvous-deaf",
        25,
        "handoff",
        "the store where links are made accepts no connection for 5 s; then a pair must be made again",
        "steady, then fingerprint",
        "pairs that stand go on; the pair is made within 10 s of the end",
        "SYNs dropped; the new connections",
        deafen_rendezvous(5.0),
    ),
    Row(
        "ray-kills-actor",
        26,
        "Ray",
        "kills an actor with 10 calls in its queue",
        "computing",
        "every answer is right; no call is run by its successor",
        "how each call ended; the process is gone",
        kill_actor(10),
        shape=INSTRUMENTED,
    ),
    *(
        Row(
            f"clock-{role}",
            28,
            "clock",
            f"the wall clock of a {words} jumps by +1 h, then by -2 h",
            "steady",
            UNNOTICED,
            "the clock was read",
            shift_clock(role, 4.0),
            shape=INSTRUMENTED,
        )
        for role, words in (("prefill", "prefill worker"), ("decode", "decode worker"), ("router", "router"))
    ),
    Row(
        "other-weights",
        36,
        "weights",
        "a pair of workers with other weights joins; a decode worker of each kind dies",
        "decoding",
        "every answer is of one kind of weights to its last token; clients of what no other can finish get an error",
        "answers of both kinds; the processes are gone",
        join_with_other_weights(),
        allowed=REPORTED,
    ),
    Row(
        "ray-control-killed",
        27,
        "Ray",
        "SIGKILL of its control store, 40 s",
        "steady",
        "workers serve on; every answer is right",
        "the process is gone, its port closed",
        kill_ray_control(40.0),
        shape=Shape(1, 1),
    ),
)
