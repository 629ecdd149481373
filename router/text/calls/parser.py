"""What a model's answer is made of: reasoning, content and calls, told apart while it comes. Pure: no IO.

`FAMILIES` is the table: one row for each way in which models write calls. A new one is a row, and a reader of what
follows its marker in `bodies`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from router.text.calls import bodies, harmony
from router.text.calls.reader import Kind, Piece, Reader, Reading

HARMONY = "harmony"
THINK = "think"
THINK_BEGIN, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Family:
    """`begins`: markers that calls begin with, wherever they stand. `tokens`: those of its format that a tokenizer may
    count among the special ones, which are otherwise no text. `bare` reads calls that an answer begins with, unmarked.
    """

    begins: tuple[str, ...]
    read: Callable[[Reader, str], Reading[None]]
    tokens: tuple[str, ...] = ()
    bare: Callable[[Reader, Collection[str]], Reading[None]] | None = None


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(("<tool_call>",), bodies.hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": Family(("<|python_tag|>",), bodies.llama, ("<|python_tag|>",), bodies.bare_llama),
    "mistral": Family(("[TOOL_CALLS]",), bodies.mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "deepseek": Family(
        (bodies.DEEPSEEK_BEGIN, bodies.DEEPSEEK_CALL),
        bodies.deepseek,
        (
            *(bodies.DEEPSEEK_BEGIN, bodies.DEEPSEEK_END, bodies.DEEPSEEK_CALL),
            *(bodies.DEEPSEEK_CALL_END, bodies.DEEPSEEK_SEPARATOR),
        ),
    ),
}
TOOL_PARSERS = (*FAMILIES, HARMONY)
REASONING_PARSERS = (THINK, HARMONY)


class Thinking(Enum):
    """Where an answer begins, by how its prompt ends."""

    UNKNOWN = auto()  # it may begin with a thought
    OPEN = auto()  # in a thought, which the prompt has opened
    CLOSED = auto()  # behind it


@dataclass(frozen=True, slots=True)
class Format:
    """What to look for in one request's answers. "" = nothing."""

    tools: str = ""
    reasoning: str = ""
    thinking: Thinking = Thinking.UNKNOWN
    names: frozenset[str] = field(default_factory=frozenset)  # of the tools
    is_whole: bool = False  # the answer is sent at once
    is_single: bool = False  # one call at most

    @property
    def tokens(self) -> frozenset[str]:
        """Markers that must be seen, were they special tokens."""
        tokens = set(FAMILIES[self.tools].tokens) if self.tools in FAMILIES else set()
        if self.reasoning == THINK:
            tokens |= {THINK_BEGIN, THINK_END}
        if HARMONY in (self.tools, self.reasoning):
            tokens |= set(harmony.MARKERS)
        return frozenset(tokens)


class OutputParser:
    """Of one choice: text in, pieces out."""

    def __init__(self, form: Format) -> None:
        self._reader = Reader(is_whole=form.is_whole)
        self._reading = _answer(self._reader, form)

    def push(self, text: str) -> list[Piece]:
        self._reader.add(text)
        next(self._reading, None)
        return self._reader.taken()

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """The text has ended; `is_cut`: its author would have gone on."""
        self._reader.end(is_cut=is_cut)
        next(self._reading, None)
        return self._reader.taken()


def _answer(reader: Reader, form: Format) -> Reading[None]:
    if HARMONY in (form.tools, form.reasoning):
        return (yield from harmony.harmony(reader, has_tools=bool(form.tools)))
    if form.reasoning == THINK:
        yield from _thought(reader, form.thinking)
    if not form.tools:
        yield from reader.until((), Kind.CONTENT)
        return None
    family = FAMILIES[form.tools]
    if family.bare is not None:
        yield from family.bare(reader, form.names)
    while marker := (yield from reader.until(family.begins, Kind.CONTENT)):
        yield from family.read(reader, marker)
    return None


def _thought(reader: Reader, thinking: Thinking) -> Reading[None]:
    """A thought before the answer, if there is one. Line ends around it belong to the format."""
    if thinking is Thinking.CLOSED:
        return
    reader.mark()
    yield from reader.skip_space()
    has_begin = yield from reader.skip(THINK_BEGIN)
    if not has_begin and thinking is Thinking.UNKNOWN:
        return reader.give_back()
    reader.settle()
    yield from reader.skip_space()
    if (yield from reader.until((THINK_END,), Kind.REASONING)):
        reader.settle()
        yield from reader.skip_space()
