import asyncio

from router.front.http.transport import GatheringTransport


class Recorder(asyncio.Transport):
    """What reaches the connection."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.calls: list[bytes | str] = []
        self.num_unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.calls or "abort" in self.calls


def made() -> tuple[Recorder, GatheringTransport]:
    recorder = Recorder()
    return recorder, GatheringTransport(recorder, asyncio.get_running_loop())


async def test_what_is_written_in_one_turn_is_one_write_and_later_ones_are_their_own() -> None:
    recorder, transport = made()
    transport.write(b"head")
    transport.write(b"body")
    assert recorder.calls == []
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert recorder.calls == [b"headbody", b"next"]


async def test_closing_sends_what_was_written_first() -> None:
    recorder, transport = made()
    transport.write(b"last")
    transport.close()
    await asyncio.sleep(0)
    assert recorder.calls == [b"last", "close"]
    assert transport.is_closing()


async def test_giving_way_waits_for_nothing_but_what_is_still_to_be_sent() -> None:
    for num_unsent, ending in ((0, "abort"), (7, "close")):
        recorder, transport = made()
        recorder.num_unsent = num_unsent
        transport.write(b"last")
        transport.evict()
        assert recorder.calls == [b"last", ending]


async def test_aborting_sends_nothing_more() -> None:
    recorder, transport = made()
    transport.write(b"never")
    transport.abort()
    transport.write(b"nor this")
    await asyncio.sleep(0)
    assert recorder.calls == ["abort"]
    assert transport.get_extra_info("peername") == ("127.0.0.1", 1)
