"""Events of text alone, made from one that was rendered in the ordinary way: nothing but the text differs."""

import secrets
from collections.abc import Callable

from router.front.http.stream import sse_text
from router.text.choice_text import ChoiceDelta

# In no name, id or text.
_MARK = secrets.token_hex(16)
_QUOTED_MARK = sse_text(_MARK)


def is_plain(delta: ChoiceDelta) -> bool:
    """Most deltas: content alone, or reasoning alone."""
    return bool(delta.text) != bool(delta.reasoning) and delta.end is None and not delta.calls


class PlainFrames:
    """Of one answer whose events tell neither tokens nor counts.

    `render`: the ordinary frame of a choice's delta. It is asked once for each choice and kind of text; encoding the
    whole object for every token took most of the time of a streamed token's way out.
    """

    def __init__(self, render: Callable[[int, ChoiceDelta], bytes]) -> None:
        self._render = render
        self._around: dict[tuple[int, bool], list[bytes]] = {}

    def frame(self, index: int, delta: ChoiceDelta) -> bytes:
        """The event of a plain delta of the answer's choice `index`."""
        key = index, bool(delta.text)
        around = self._around.get(key)
        if around is None:
            marked = ChoiceDelta(delta.choice_idx, (), _MARK if delta.text else "", reasoning=delta.reasoning and _MARK)
            around = self._around[key] = self._render(index, marked).split(_QUOTED_MARK)
        return sse_text(delta.text or delta.reasoning).join(around)
