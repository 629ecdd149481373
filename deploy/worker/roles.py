"""Which code serves which role: the one place that knows both. Imported in a worker's process only: it loads torch."""

from common.values.config import WorkerConfig
from common.worker.control import WorkerControl
from common.worker.host import WorkerHost
from common.worker.lifecycle import Build, run_worker


def build_of(role: str) -> Build:
    """What builds a role around a loaded model."""
    if role == "prefill":
        from prefill_worker.worker import build as build_prefill

        return build_prefill
    from decode_worker.worker import build as build_decode

    return build_decode


async def serve(config: WorkerConfig, control: WorkerControl) -> None:
    """Run a worker until it is drained or stopped, in the role of `config` and in those it is asked to take later."""
    await run_worker(config, control, build_of)


class WorkerOfAnyRole(WorkerHost):
    """What a Ray actor holds (`deploy.ray.worker_actor`): placement and lifecycle only, never the token path."""

    def __init__(self, config_json: str) -> None:
        super().__init__(config_json, serve)
