"""The memory of the current CUDA device, as torch and the driver count it."""

from collections.abc import Callable

import torch


class CudaMemory:
    """`Memory`."""

    def total(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def held(self) -> int:
        return torch.cuda.memory_reserved()

    def peak_of(self, run: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
