"""Records a step as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch


class CudaCapture:
    """`Capture` on the current CUDA device. All graphs share memory: they run one after another."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles what is not compiled yet, which a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads copy KV on streams of their own meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = run()
        self._pool = self._pool or graph.pool()
        return graph.replay, logits
