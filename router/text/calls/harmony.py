"""gpt-oss's format: messages on channels. The channel analysis is reasoning; a message to a function is a call."""

import re

from router.text.calls.bodies import named_call
from router.text.calls.json_scan import Malformed
from router.text.calls.reader import Ended, Kind, Reader, Reading

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)
# Of a message.
_ENDS = (END, CALL, RETURN, START)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_MAX_HEADER_LENGTH = 256
_FUNCTIONS = "functions."


def harmony(reader: Reader, *, has_tools: bool) -> Reading[None]:
    """An answer from behind `<|start|>assistant` on."""
    has_content = False
    while (yield from reader.peek()):
        reader.mark()
        try:
            header, _ = yield from reader.upto((MESSAGE,), _MAX_HEADER_LENGTH)
        except (Malformed, Ended):
            if not _begins_header(reader.marked()):
                reader.give_back()
            reader.settle()
            yield from reader.until((), Kind.CONTENT)
            return
        found, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_thought = found is not None and found[1] == "analysis"
        if recipient and has_tools:
            yield from reader.call(named_call(reader, recipient[1].removeprefix(_FUNCTIONS)))
            yield from _pass_end(reader)
            continue
        reader.settle()
        if not is_thought and has_content:
            reader.give_content("\n")
        has_content = has_content or not is_thought
        yield from reader.until(_ENDS, Kind.REASONING if is_thought else Kind.CONTENT)
        reader.settle()


def _begins_header(text: str) -> bool:
    """Whether the text ended in a header: that is no content."""
    return text.lstrip().startswith((CHANNEL, START))


def _pass_end(reader: Reader) -> Reading[None]:
    yield from reader.skip_space()
    for marker in _ENDS[:-1]:
        if (yield from reader.skip(marker)):
            return
