"""What an operator sees of each fault and does about it, as data: the runbook of `docs/robustness.md` is drawn from it.

Names in backticks are metrics, log events or commands of ours; a test looks for each in the code.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """`rows`: beginnings of the names of the chaos rows that make this fault."""

    fault: str
    rows: tuple[str, ...]
    users: str
    metrics: str
    logs: str
    page: str
    action: str


RUNBOOK: tuple[Entry, ...] = (
    Entry(
        "a prefill worker dies",
        ("prefill-killed", "ray-kills-actor"),
        "nothing, at most a later first token; where it was the only one, a pause until it is replaced "
        "(an error after `router.pair_grace_s`)",
        "`pdserve_request_retries` with reason prefill_worker; `pdserve_workers` one less for seconds",
        "router: `worker_stream_ended`, `request_retried`",
        "the worker goes and comes with another incarnation",
        "nothing; if it repeats, the reason is in the output of `pdserve up` and the worker's log",
    ),
    Entry(
        "a decode worker dies",
        ("decode-killed",),
        "a pause in the stream, then the same tokens; where it was the only one, until it is replaced "
        "(an error after `router.pair_grace_s`)",
        "`pdserve_request_retries` with reason decode_worker; a peak of `pdserve_inter_token_latency_seconds`",
        "router: `worker_stream_ended`, `request_retried`; prefill workers: `handoff_peer_lost`",
        "the worker goes and comes; the waterfall of a request shows two attempts",
        "nothing; if it repeats, as above",
    ),
    Entry(
        "a rank of a worker dies",
        ("rank-killed",),
        "as where a worker of its role dies: no rank goes on alone",
        "`pdserve_request_retries`; `pdserve_workers` one less until it is replaced",
        "router: `worker_stream_ended`, `request_retried`",
        "the rank is silent beneath its worker, then the worker goes and comes",
        "nothing; `pdserve status` shows the ranks and their pids",
    ),
    Entry(
        "a worker stands still, and goes on",
        ("prefill-frozen", "decode-frozen"),
        "a pause as long as `router.worker_silence_s`",
        "`pdserve_lives_given_up` with reason frozen, on the worker; `pdserve_request_retries`",
        "router: `worker_dropped`; worker: `worker_life_given_up`, then `worker_ready`",
        "the worker goes; after it goes on it is there with another incarnation, its cache empty",
        "nothing; look for what stopped it: a paused machine, swapping",
    ),
    Entry(
        "a worker stands still for good",
        ("decode-frozen-for-good",),
        "a pause as long as `router.worker_silence_s`",
        "`pdserve_workers` one less until the pool has replaced it",
        "router: `worker_dropped`; `pdserve up` says that it has not answered",
        "the pool is one short for half a minute",
        "nothing where a pool controller runs; a worker that you started yourself: kill it",
    ),
    Entry(
        "a step does not end",
        ("decode-wedged",),
        "a pause as long as the pool's `max_step_s`",
        "`pdserve_request_retries` with reason decode_worker; `pdserve_workers` one less for seconds",
        "worker: `worker_life_given_up`; router: `worker_stream_ended`, `request_retried`",
        "the worker goes and comes; its pool says why the last one ended",
        "nothing; if it repeats on one machine, look at its device",
    ),
    Entry(
        "a worker is slow",
        ("prefill-slow", "host-busy"),
        "later first tokens on a part of the requests",
        "`pdserve_step_seconds` of that worker; `pdserve_waiting_uncached_tokens`",
        "nothing",
        "its share of the new requests falls",
        "drain it (`pdserve drain`), look at the machine",
    ),
    Entry(
        "a handoff link is cut, deaf or slow",
        ("handoff",),
        "nothing, at most a pause of `link_timeout_s`",
        "`pdserve_kv_transfer_failures`; `pdserve_request_retries` with reason transfer",
        "both workers: `handoff_peer_lost`, then `handoff_peer_ready`; router: `request_retried`",
        "no bytes on the edge between the two, then again",
        "if it repeats, look at the network between the two",
    ),
    Entry(
        "no link can be made to a decode worker",
        ("rendezvous",),
        "nothing: pairs that stand go on, other requests go to other decode workers",
        "`pdserve_kv_transfer_failures`; `pdserve_request_retries` with reason transfer",
        "prefill workers: `handoff_peer_lost`; router: `request_retried`",
        "no bytes on the edges to that worker",
        "let its port for the rendezvous be reached",
    ),
    Entry(
        "a step fails, or a row of it is not finite",
        ("prefill-layer", "decode-row"),
        "a failed step: nothing, its requests go elsewhere; a row that is not finite: that client gets an error",
        "`pdserve_request_retries` with reason prefill_worker; `pdserve_requests` with status failed",
        "worker: `step_failed`; router: `request_retried`, `request_failed`",
        "the waterfall of a request shows another try",
        "if it repeats, look at the device; a checkpoint may be damaged",
    ),
    Entry(
        "the clock of a machine jumps",
        ("clock",),
        "nothing",
        "nothing",
        "nothing; the times of log lines jump",
        "times of day are wrong",
        "set the clock right",
    ),
    Entry(
        "workers of other weights are in the cluster",
        ("other-weights",),
        "each answer is of one kind of weights; those of a kind whose last decode worker dies end with an error",
        "`pdserve_requests` with error_type no_ready_pair",
        "router: `request_retried`, `request_failed`",
        "the workers, with different fingerprint keys",
        "end the old ones by `pdserve drain`, not by killing them",
    ),
    Entry(
        "Ray's control store dies",
        ("ray-control",),
        "nothing: workers serve on (held for 40 s; Ray's own limits for longer absences are Ray's)",
        "nothing",
        "nothing of ours; Ray's own logs",
        "nothing; no worker is replaced or scaled",
        "start `pdserve up` again, at a good moment",
    ),
    Entry(
        "a router cannot reach a worker",
        ("router-link",),
        "a pause as long as `router.worker_silence_s`",
        "`pdserve_workers` one less on that router; `pdserve_request_retries`",
        "router: `worker_dropped`, `worker_stream_ended`; worker: `router_disconnected`",
        "the worker is gone for this router alone",
        "look at the network; the router connects again by itself",
    ),
    Entry(
        "a router is ended",
        ("router-terminated",),
        "readiness is 503 at once; streams within `router.drain_grace_s` complete, others get an error event",
        "`pdserve_requests` with error_type service_unavailable",
        "router: `router_stopped`; workers: `router_disconnected`",
        "the page does not answer for seconds",
        "nothing; take it out of the load balancer first when you end it on purpose",
    ),
    Entry(
        "a router dies",
        ("router-killed",),
        "the connection breaks; a new one goes to the new router or to the others",
        "its series end; used and held `pdserve_kv_blocks` of all workers fall at once",
        "workers: `router_disconnected`, `router_connected`; `pdserve up` says that it started another",
        "the page does not answer for seconds",
        "nothing where `pdserve up` or Kubernetes runs it; else start it again",
    ),
    Entry(
        "a router stands still, or there are several",
        ("router-blocked", "second-router"),
        "a pause as long as it stands still",
        "nothing is lost: no `pdserve_request_retries`",
        "nothing",
        "every router shows the whole cluster's workers, and its own requests",
        "nothing",
    ),
    Entry(
        "Redis is away, silent, wiped, full, read-only, late, or evicts",
        ("redis",),
        "nothing",
        "`pdserve_index_errors`; fewer `pdserve_prompt_tokens_cached`",
        "nothing per request; `index_stale_hit`; router: `registry_away`; workers: `lease_not_renewed`",
        "the prefix hit rate falls; scaling waits until Redis is back",
        "bring it back; workers say everything again within seconds",
    ),
    Entry(
        "the KV pool is too small for the load",
        ("decode-pool", "prefill-pool"),
        "pauses, no errors",
        "`pdserve_preemptions`; `pdserve_kv_cache_usage_ratio` near 1",
        "nothing",
        "no free blocks on a decode worker",
        "more decode workers (`pdserve scale`), or a larger `kv_cache_bytes`",
    ),
    Entry(
        "the disk of the logs is full",
        ("log-disk-full",),
        "nothing",
        "nothing",
        "`log_lines_lost` once there is room again",
        "nothing",
        "make room; lines in between are lost",
    ),
    Entry(
        "the router runs out of descriptors",
        ("few-descriptors",),
        "new connections wait or are refused; running streams go on",
        "the process's open files at their limit",
        "router: errors of accept, with the reason EMFILE",
        "nothing",
        "raise the limit (ulimit -n), or more routers",
    ),
    Entry(
        "a pool shrinks",
        ("decode-scaled-in",),
        "nothing",
        "`pdserve_workers` with state draining",
        "worker: `worker_ended`",
        "the worker is draining, then gone",
        "nothing",
    ),
    Entry(
        "clients read slowly, or leave",
        ("slow-readers", "clients-leave"),
        "others notice nothing",
        "`pdserve_requests` with error_type request_cancelled for those who left",
        "`request_failed` with the code of a cancellation",
        "requests that ended early",
        "nothing",
    ),
    Entry(
        "more comes than the cluster can take",
        (),
        "503 with Retry-After",
        "`pdserve_admission_rejections`; `pdserve_requests_waiting` at its limit",
        "`request_refused`",
        "queues are full",
        "more workers, or `--autoscale`",
    ),
)
