"""What rank 0 says to the other ranks of its worker, and what they answer, over a socket pair each.

A message is its length (4 bytes), then msgpack; descriptors travel beside the first byte. An answer is empty, or says
what went wrong. Who waits sleeps in the kernel. A closed socket is the other process's end.
"""

import socket
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec

from common.engine.contract.collectives import RankLost
from common.engine.contract.plan import SampleSpec, ScheduledSequence, StepPlan
from common.values.request import SamplingParams

_LENGTH = struct.Struct("<I")
_MAX_FDS = 250  # the kernel's limit is 253
# What is drawn is rank 0's business: the others know how many rows of logits are wanted, which counts samples.
_DRAWN_ELSEWHERE = SampleSpec(choice_idx=0, position=0, params=SamplingParams(seed=0, max_tokens=1))
_FIELDS = tuple(field.name for field in fields(ScheduledSequence))
_SAMPLES = _FIELDS.index("samples")
_HINTS = get_type_hints(ScheduledSequence) | {"samples": int}
_ROW: Any = tuple[tuple(_HINTS[name] for name in _FIELDS)]  # type: ignore[misc]  # made from the class's own fields


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The first message. Descriptors: the shared memory, then sockets to `peers`, in their order."""

    config_json: str
    rank: int
    world_size: int
    peers: tuple[int, ...]


class NewCache(msgspec.Struct, tag=True, frozen=True):
    """Use an empty KV cache of this size from now on. Descriptor: its memory."""

    block_size: int
    num_blocks: tuple[int, ...]


class Step(msgspec.Struct, tag=True, frozen=True):
    """Run one step; `sequences` as `rows_of` has them."""

    step_id: int
    sequences: tuple[_ROW, ...]
    block_copies: tuple[tuple[int, int, int], ...]

    def plan(self) -> StepPlan:
        return StepPlan(self.step_id, tuple(map(_sequence, self.sequences)), self.block_copies)


Message = Begin | NewCache | Step
_encoder = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


def encode_step(plan: StepPlan) -> bytes:
    """A plan as the ranks that draw nothing need it."""
    return _encoder.encode(Step(plan.step_id, tuple(map(_row, plan.sequences)), plan.block_copies))


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    return _decoder.decode(data)


class Channel:
    """One end. Not thread-safe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Raises RankLost when the other process has ended."""
        framed = _LENGTH.pack(len(data)) + data
        try:
            sent = socket.send_fds(self._end, [framed], fds) if fds else self._end.send(framed)
            self._end.sendall(memoryview(framed)[sent:])
        except OSError as error:
            raise RankLost(f"a rank's process takes no messages: {type(error).__name__}") from error

    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next message and the descriptors that came with it; None when the other process has ended."""
        head = b""
        fds: list[int] = []
        try:
            while len(head) < _LENGTH.size:
                data, found, _, _ = socket.recv_fds(self._end, _LENGTH.size - len(head), _MAX_FDS)
                if not data:
                    return None
                head, fds = head + data, fds + found
            return self._read(_LENGTH.unpack(head)[0]), fds
        except OSError:
            return None

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._end.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)


def _row(sequence: ScheduledSequence) -> tuple[Any, ...]:
    row = [getattr(sequence, name) for name in _FIELDS]
    row[_SAMPLES] = len(sequence.samples)
    return tuple(row)


def _sequence(row: tuple[Any, ...]) -> ScheduledSequence:
    values = dict(zip(_FIELDS, row, strict=True))
    return ScheduledSequence(**(values | {"samples": (_DRAWN_ELSEWHERE,) * values["samples"]}))
