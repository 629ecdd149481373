"""The ways that ARCHITECTURE.md draws through the code are there: each file exists and hands on to the next."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest

from tests.router.front.http_rig import http_rig, ids
from tests.router.front.scripted_service import ScriptedService, answer

ROOT = Path(__file__).parents[2]
# Where protocols, events and effects are named: two files that use one of them meet there.
MEETING_PLACES = (
    *("common/engine/contract/", "kvtransfer/events.py", "kvtransfer/links/protocol.py"),
    *("common/values/messages.py", "common/values/request.py", "router/core/events.py", "router/core/generation.py"),
)
WAYS = {"way of a KV chunk": 18, "way of a token": 14}


def files_of(way: str, page: str) -> list[str]:
    """The files of a fenced list with that heading, in order."""
    (block,) = re.findall(rf"```\n{re.escape(way)}\n(.*?)```", page, flags=re.DOTALL)
    return block.split()


def imports_of(path: str) -> set[str]:
    """The files of ours that a file imports from."""
    return set(_imports(ast.parse((ROOT / path).read_text())))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (file for name in names if (ROOT / (file := f"{name.replace('.', '/')}.py")).is_file())


def is_joined(first: str, second: str, way: list[str]) -> bool:
    """One imports the other, or something of the way that does; or both import one place where protocols are named."""
    ours, theirs = imports_of(first), imports_of(second)
    through = {file for file in way if file in ours and second in imports_of(file)}
    shared = {file for file in ours & theirs if file.startswith(MEETING_PLACES)}
    return second in ours or first in theirs or bool(through) or bool(shared)


@pytest.mark.parametrize(("way", "max_files"), WAYS.items())
def test_a_way_leads_from_file_to_file_and_is_short(way: str, max_files: int) -> None:
    files = files_of(way, (ROOT / "ARCHITECTURE.md").read_text())
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert [pair for pair in pairwise(files) if not is_joined(*pair, files)] == []
    assert len(set(files)) == len(files)
    assert 2 < len(files) <= max_files


def test_files_that_do_not_know_each_other_are_no_way() -> None:
    assert not is_joined("kvtransfer/sender/core.py", "common/engine/kv/cache.py", [])
    assert not is_joined("kvtransfer/chunk/aead.py", "kvtransfer/links/process_group.py", [])
    assert is_joined("kvtransfer/sender/core.py", "kvtransfer/receiver/core.py", [])


# What runs beside a token on its way through the router: no text passes through it, or only its bytes.
BESIDE = {
    "router/core/generation.py": "how many choices are told",
    "router/front/http/leaving.py": "whether the client is there",
    "router/front/http/protocol.py": "whether a write may have to wait",
    "router/front/http/server.py": "the application that awaits the stream",
    "router/front/http/transport.py": "bytes to the socket",
    "router/tenants/tenants.py": "what the tenant has left",
}


async def test_a_token_runs_through_the_files_of_its_way_in_the_router_and_no_others() -> None:
    """From the service to the socket: the files that are called at least once for each token of a long stream."""
    num_tokens = 400
    service = ScriptedService(lambda request: answer(request, ids("x" * num_tokens)))
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT / "router"):
            calls[str(file.relative_to(ROOT))] += 1

    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": num_tokens}
    async with http_rig(service) as rig:
        sys.setprofile(note)
        try:
            reply = await rig.post("/v1/chat/completions", body)
        finally:
            sys.setprofile(None)
    assert reply.text.count('"content":"x"') == num_tokens
    ran = {file for file, num_calls in calls.items() if num_calls >= num_tokens}
    way = files_of("way of a token", (ROOT / "ARCHITECTURE.md").read_text())
    of_the_front = {file for file in way if file.startswith(("router/front/", "router/text/"))}
    assert ran - BESIDE.keys() == of_the_front
    assert BESIDE.keys() <= ran
