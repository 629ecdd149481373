"""Floods: bursts of requests over what the router queues. Who is refused goes; who is not leaves in mid-answer."""

import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx

from common.values.errors import Overloaded

# Nobody waits longer for a line of an answer that it means to leave.
MAX_STAY_S = 30.0


@dataclass(slots=True)
class Floods:
    """`size` requests at once, again and again, each over a connection of its own."""

    url: str
    rng: random.Random
    size: int
    num_floods: int = 0  # of which at least one request was refused
    num_refused: int = 0
    num_left: int = 0
    num_cut: int = 0  # connections that broke: a router has died
    problems: list[str] = field(default_factory=list)

    async def run(self, count: int, until_s: float) -> None:
        """So many, evenly over the time, or as many as it takes longer."""
        while self.num_floods < count and (left_s := until_s - time.monotonic()) > 0:
            next_s = time.monotonic() + left_s / (count - self.num_floods)
            before = self.num_refused
            await asyncio.gather(*(self._ask() for _ in range(self.size)))
            self.num_floods += self.num_refused > before
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _ask(self) -> None:
        prompt = self.rng.choices(range(5, 95), k=self.rng.randint(4, 40))
        body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
        num_lines = self.rng.randint(0, 4)
        try:
            async with (
                asyncio.timeout(MAX_STAY_S),
                httpx.AsyncClient(timeout=MAX_STAY_S, trust_env=False, verify=False) as client,
                client.stream("POST", f"{self.url}/v1/completions", json=body) as reply,
            ):
                await self._stay(reply, num_lines)
        except (httpx.HTTPError, TimeoutError):
            self.num_cut += 1

    async def _stay(self, reply: httpx.Response, num_lines: int) -> None:
        """Leaves with so many lines of the answer, or without one."""
        if reply.status_code == Overloaded.http_status and Overloaded.error_type.encode() in await reply.aread():
            self.num_refused += 1
            return
        if reply.status_code != 200:
            self.problems.append(f"a flood was answered {reply.status_code}: {(await reply.aread())[:200]!r}")
            return
        async for line in reply.aiter_lines():
            num_lines -= line.startswith("data: ")
            if num_lines <= 0:
                break
        self.num_left += 1
