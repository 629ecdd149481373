"""A decode worker's core before the real runner, stepped by hand: prompts are prefilled where they are decoded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.engine.contract.executor import StepFinished
from common.engine.kv.block_pool import BlockPool
from common.engine.loading import LoadedModel, load_model
from common.engine.scheduling.block_tables import PoolGroup
from common.values.config import ModelConfig, WorkerConfig
from common.values.request import SamplingParams
from tests.decode_worker.harness import Bench, job


class Served(Bench):
    """`most_used`: blocks of each group of layers in use at once, at most."""

    def __init__(
        self,
        path: Path,
        *,
        num_windowed: int = 0,
        fills_unused: bool = False,
        max_num_batched_tokens: int = 512,
        **fields: Any,
    ) -> None:
        """`num_windowed`: blocks of groups with a window, where not all that the cache has. `fills_unused`: before each
        step all blocks that nobody refers to are filled with NaN, so that none is read unnoticed. Others are fields of
        `WorkerConfig`.
        """
        self._fills_unused = fills_unused
        self.loaded: LoadedModel = load_model(
            WorkerConfig(
                role="decode",
                worker_id="d",
                model=ModelConfig(path=str(path)),
                max_num_batched_tokens=max_num_batched_tokens,
                **fields,
            )
        )
        cache = self.loaded.cache
        counts = [
            num_windowed if group.window and num_windowed else count
            for group, count in zip(cache.spec.groups, cache.num_blocks, strict=True)
        ]
        groups = [
            PoolGroup(BlockPool(count, cache.block_size), group.window)
            for count, group in zip(counts, cache.spec.groups, strict=True)
        ]
        super().__init__(groups=groups, budget=max_num_batched_tokens, block_size=cache.block_size)
        self.most_used = [0] * len(groups)

    def _new_runner(self) -> Any:
        return self.loaded.runner

    def step(self, seconds: float = 0.01) -> list[Any]:
        plan = self._take_plan(seconds)
        for idx, (group, planes) in enumerate(zip(self.core.blocks.groups, self.loaded.cache.planes, strict=True)):
            for plane in planes if self._fills_unused else ():
                plane[:, group.pool._free] = torch.nan
            self.most_used[idx] = max(self.most_used[idx], group.pool.stats().used)
        return self.handle(StepFinished(replace(self.loaded.runner.run(plan), duration_s=seconds)))

    def ask(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Greedily, with every token of the prompt computed here."""
        params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
        self.reserve(job(name, tuple(prompt), sampling=params), local=1 << 20)
