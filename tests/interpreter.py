"""Import triton so that kernels run on the CPU in this process, without telling child processes to do the same."""

import os


def import_triton_interpreted() -> None:
    """Must run before anything else in the process imports triton; raises if it came too late."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True  # for kernels decorated later; also writes the variable, restored below
    from common.engine.devices.triton import launch

    if before is None:
        del os.environ["TRITON_INTERPRET"]
    if not launch.is_interpreted():
        raise RuntimeError("triton was imported earlier without its interpreter; import it through tests.interpreter")
