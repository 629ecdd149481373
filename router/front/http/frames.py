"""Events of plain text, made from one that was rendered in the ordinary way: nothing but the text differs."""

import secrets
from collections.abc import Callable

from router.front.http.stream import sse_text
from router.text.choice_text import ChoiceDelta

# No name, id or text of anybody holds it.
_MARK = secrets.token_hex(16)
_QUOTED_MARK = sse_text(_MARK)


def is_plain(delta: ChoiceDelta) -> bool:
    """Most deltas: text and nothing else."""
    return bool(delta.text) and delta.end is None and not delta.reasoning and not delta.calls


class PlainFrames:
    """Of one answer whose events tell neither tokens nor counts.

    `render`: the ordinary frame of a choice's delta. It is asked once for each choice; encoding the whole object for
    every token took most of the time of a streamed token's way out.
    """

    def __init__(self, render: Callable[[int, ChoiceDelta], bytes]) -> None:
        self._render = render
        self._sides: dict[int, tuple[bytes, bytes]] = {}

    def frame(self, index: int, delta: ChoiceDelta) -> bytes:
        """The event of a plain delta of the answer's choice `index`."""
        sides = self._sides.get(index)
        if sides is None:
            head, tail = self._render(index, ChoiceDelta(delta.choice_idx, (), _MARK)).split(_QUOTED_MARK)
            sides = self._sides[index] = (head, tail)
        return b"%b%b%b" % (sides[0], sse_text(delta.text), sides[1])
