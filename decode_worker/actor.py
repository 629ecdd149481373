"""The decode worker as a Ray actor: placement and lifecycle only, never the token path."""

from common.worker.host import WorkerHost
from decode_worker.worker import serve


class DecodeActor(WorkerHost):
    """`ray.remote(DecodeActor)` it with max_concurrency > 1: `wait` blocks for the worker's whole life."""

    def __init__(self, config_json: str) -> None:
        super().__init__(config_json, serve)
