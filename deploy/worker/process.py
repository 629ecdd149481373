"""`pdserve worker`: one worker in this process, without Ray; what a deployment runs that places workers itself."""

import asyncio
import os
import sys
import traceback
from typing import NoReturn

from common.values.config import WorkerConfig
from common.values.errors import PdserveError
from deploy.worker.env import has_gpu, num_cores, worker_environment

DRAIN_GRACE_S = 30.0


def run_worker(config: WorkerConfig, drain_grace_s: float = DRAIN_GRACE_S) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once. Ends the process."""
    if not config.num_threads:
        config = config.model_copy(update={"num_threads": num_cores()})
    # Before torch is imported: it reads them once.
    os.environ.update(worker_environment(config, has_gpu=has_gpu()))
    import uvloop

    code = 0
    try:
        uvloop.run(_serve(config, drain_grace_s))
    except PdserveError as error:  # for an operator: what is wrong is in the message
        print(f"pdserve: {error}", file=sys.stderr)
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not a normal exit: a gloo receive that waits for a peer cannot be woken, and destroying its thread aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _serve(config: WorkerConfig, drain_grace_s: float) -> None:
    from common.worker.control import WorkerControl
    from deploy.worker.roles import serve

    control = WorkerControl(asyncio.get_running_loop(), _ignore)
    control.handle_signals(drain_grace_s)
    await serve(config, control)


def _ignore(description: object) -> None:
    """Who waits for this worker sees it in the registry and in its log."""
