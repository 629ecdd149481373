"""Two tenants of one live cluster: one floods it, the other asks for little. Figures of both, alone and together."""

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from deploy.cli.keys import hash_line, new_key

FLOOD, OTHER = new_key(), new_key()
ADMIN = "admin-" + "a" * 40
TIMEOUT_S = 300.0


@contextmanager
def two_tenants(folder: Path) -> Iterator[dict[str, str]]:
    """What a router's configuration needs for them."""
    tenants = f"tenants:\n  flood: {{keys: [{hash_line(FLOOD)}]}}\n  other: {{keys: [{hash_line(OTHER)}]}}\n"
    (folder / "keys.yaml").write_text(f"cache_salt_secret: {'ab' * 32}\n{tenants}")
    (folder / "admin").write_text(f"{ADMIN}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_ROUTER_ADMIN_KEY", ADMIN)  # for calls of our own; the cluster reads its file
        yield {"api_keys_file": str(folder / "keys.yaml"), "admin_key_file": str(folder / "admin")}


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of a prompt and of an answer, and how many there are: the flood at once, the other's one by one."""

    num_flood: int = 48
    flood_prompt: int = 96
    flood_answer: int = 48
    num_other: int = 7
    other_prompt: int = 24
    other_answer: int = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """Times to the other's first token, in seconds and as medians; the flood's tokens per second."""

    unloaded_s: float
    sharing_s: float
    alone_tokens_per_s: float
    sharing_tokens_per_s: float

    @property
    def times_slower(self) -> float:
        return self.sharing_s / self.unloaded_s

    @property
    def throughput_kept(self) -> float:
        return self.sharing_tokens_per_s / self.alone_tokens_per_s

    def __str__(self) -> str:
        return (
            f"first token of the other tenant: {self.unloaded_s * 1000:.0f} ms unloaded, "
            f"{self.sharing_s * 1000:.0f} ms amid the flood ({self.times_slower:.1f} times); "
            f"the flood: {self.alone_tokens_per_s:.0f} tokens/s alone, "
            f"{self.sharing_tokens_per_s:.0f} while sharing ({self.throughput_kept:.0%})"
        )


async def measure(url: str, load: Load) -> Figures:
    """1. the other alone; 2. the flood alone; 3. both; 4. the other alone again: machines have worse times."""
    limits = httpx.Limits(max_connections=load.num_flood + 1)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        clients = _Clients(client, load)
        await clients.others(2)  # warm
        unloaded_s = await clients.others(load.num_other)
        alone = await clients.flood()
        clients.flood_began.clear()
        flooding = asyncio.create_task(clients.flood())
        await clients.flood_began.wait()
        sharing_s: list[float] = []
        while not clients.is_over:
            sharing_s += await clients.others(1)
        sharing = await flooding
        unloaded_s += await clients.others(load.num_other)
    assert len(sharing_s) >= 3, "the flood is over before the other has been served"
    return Figures(statistics.median(unloaded_s), statistics.median(sharing_s), alone, sharing)


class _Clients:
    def __init__(self, client: httpx.AsyncClient, load: Load) -> None:
        self._client = client
        self._load = load
        self._num_asked = 0
        self.flood_began = asyncio.Event()
        self.is_over = False

    async def others(self, count: int) -> list[float]:
        return [await self._first_token_s() for _ in range(count)]

    async def flood(self) -> float:
        """Tokens per second of a burst, of whole answers: a client with many streams is busy with reading."""
        self.is_over = False
        load, began_s = self._load, time.monotonic()
        await asyncio.gather(*(self._whole_answer() for _ in range(load.num_flood)))
        self.is_over = True
        return load.num_flood * load.flood_answer / (time.monotonic() - began_s)

    async def _whole_answer(self) -> None:
        body = self._body(self._load.flood_prompt, self._load.flood_answer)
        reply = await self._client.post("/v1/completions", json=body, headers=_key(FLOOD))
        assert reply.status_code == 200, reply.text
        self.flood_began.set()

    async def _first_token_s(self) -> float:
        body = {**self._body(self._load.other_prompt, self._load.other_answer), "stream": True}
        began_s, first_s = time.monotonic(), 0.0
        async with self._client.stream("POST", "/v1/completions", json=body, headers=_key(OTHER)) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    first_s = first_s or time.monotonic() - began_s
        assert first_s, "no token came"
        return first_s

    def _body(self, num_tokens: int, max_tokens: int) -> dict[str, object]:
        """A prompt that nobody has asked before."""
        self._num_asked += 1
        prompt = [5 + (self._num_asked * 31 + idx * (7 + self._num_asked % 5)) % 90 for idx in range(num_tokens)]
        return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
