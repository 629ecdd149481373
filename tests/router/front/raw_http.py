"""Bytes to a port and what comes back: for requests that no client library would send."""

import asyncio


async def exchange(port: int, raw: bytes, limit_s: float = 60.0) -> tuple[int, bytes]:
    """Status and body of the first answer to `raw`; status 0 when the connection ends without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        async with asyncio.timeout(limit_s):
            return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next answer on a connection; it must state its length."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return 0, b""
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split(" ")[1]), await reader.readexactly(int(headers["content-length"]))
