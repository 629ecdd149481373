"""Turns the tokens of one choice into text as they come: detokenizes, and ends the choice at a stop string. No IO.

A token is released together with its text: not while its bytes are half a character, not while its text may become
a stop string, but never more than some tokens late. So the text and the token ids that a client gets belong together.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.values.request import FinishReason, SampledToken, TokenEvent
from router.text.stop_strings import Scan, StopScanner
from router.text.token_text import TokenTexts

# No character is longer than four tokens of one byte each; a longer wait means bytes that are no text.
_MAX_PENDING_TOKENS = 8
# Enough for decoders that look at the token before (a leading space is dropped at the start of a text only).
_NUM_CONTEXT_TOKENS = 4
# A client hears of a token at most so many tokens late, whatever its text waits for.
_MAX_HELD_TOKENS = 64
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request's text is made. `stop_token_ids` are the client's own, reported when one ends a choice."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    return_text: bool = True
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()  # special tokens that are text all the same: markers of a format


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why a choice ended; at most one of the two matches is set. `reason` None: it was aborted."""

    reason: FinishReason | None
    num_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None
    has_calls: bool = False  # complete ones

    @property
    def waits_for_results(self) -> bool:
        """The model has called functions and ended its turn."""
        return self.has_calls and self.reason is FinishReason.STOP


@dataclass(frozen=True, slots=True)
class CallPart:
    """News of one call: its id and name when it begins, else the next piece of its arguments."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice: tokens and their text, and how it ended when this is the last.

    `reasoning` and `calls` are told apart from the text where a format says so.
    """

    choice_idx: int
    tokens: tuple[SampledToken, ...]
    text: str
    end: ChoiceEnd | None = None
    offsets: tuple[int, ...] = ()  # of each token: where in the choice's text its own begins
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()


class Detokenizer:
    """Incremental: `push` returns only whole characters, `flush` the rest without an incomplete one.

    A U+FFFD in the decoded text may be half a character or one that the model wrote: the tokens' bytes tell.
    """

    def __init__(
        self,
        token_texts: TokenTexts,
        context: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown_ids: Collection[int] = (),
    ) -> None:
        self._token_texts = token_texts
        self._hidden_ids = token_texts.special_ids - set(shown_ids) if skip_special_tokens else frozenset[int]()
        # With tokens to show, `hides` alone keeps the others out.
        self._skip_special_tokens = skip_special_tokens and not shown_ids
        self._ids = list(context[-_NUM_CONTEXT_TOKENS:])
        self._num_shown = len(self._ids)
        self._shown = self._finished()
        self.is_waiting = False  # for the rest of a character

    def hides(self, token_id: int) -> bool:
        """The token is no part of the text."""
        return token_id in self._hidden_ids

    def push(self, token_id: int) -> str:
        """Text that this token completes, often none."""
        if self.hides(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        num_pending = len(self._ids) - self._num_shown
        is_unfinished = text.endswith(_REPLACEMENT) and self._token_texts.num_unfinished(self._ids) > 0
        self.is_waiting = is_unfinished and num_pending < _MAX_PENDING_TOKENS
        if self.is_waiting:
            return ""
        new_text = text[len(self._shown) :]
        if new_text:
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
            self._shown = self._decode(self._ids)
        elif num_pending >= _MAX_PENDING_TOKENS:
            del self._ids[self._num_shown]  # tokens without text: nothing that follows needs so many of them
        return new_text

    def flush(self) -> str:
        """The end of the text. Half a character at the very end is no text."""
        return self._finished()[len(self._shown) :]

    def _finished(self) -> str:
        """The text of the tokens without half a character at its end."""
        ids, num_unfinished = list(self._ids), 0
        if self._decode(ids).endswith(_REPLACEMENT):
            num_unfinished = self._token_texts.num_unfinished(ids)
        while num_unfinished and len(self._token_texts.raw(ids[-1])) <= num_unfinished:
            num_unfinished -= len(self._token_texts.raw(ids.pop()))
        text = self._decode(ids)
        return text.removesuffix(_REPLACEMENT) if num_unfinished else text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._token_texts.tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))


class _Entry(NamedTuple):
    """A token in the queue. Places are counted in characters: `offset` in the text that the client sees."""

    token: SampledToken
    offset: int
    end: int  # of its text, hidden text included


class _TokenQueue:
    """Tokens in order, each with its place in the text; a token leaves when all its text is shown."""

    def __init__(self) -> None:
        self._unresolved: list[tuple[SampledToken, int]] = []  # their text is not complete yet
        self._resolved: deque[_Entry] = deque()
        self._num_chars = 0
        self._num_visible = 0

    @property
    def is_empty(self) -> bool:
        return not (self._unresolved or self._resolved)

    def pass_by(self, text: str) -> int:
        """A token that leaves at once with its text, while the queue is empty; returns its offset."""
        offset = self._num_visible
        self._num_visible += len(text)
        self._num_chars += len(text)
        return offset

    def push(self, token: SampledToken, text: str, hidden_text: str, *, is_waiting: bool) -> None:
        """`text` is the client's, `hidden_text` for stop strings only; with `is_waiting` more of `text` is to come."""
        self._unresolved.append((token, self._num_visible))
        self._num_visible += len(text)
        self._num_chars += len(text) + len(hidden_text)
        if not is_waiting or len(self._unresolved) > _MAX_HELD_TOKENS:
            self._resolved.extend(_Entry(*waiting, self._num_chars) for waiting in self._unresolved)
            self._unresolved.clear()

    def take(self, num_held_chars: int) -> list[_Entry]:
        """Tokens whose text is shown when the last `num_held_chars` are not. Of very many all but the last leave."""
        entries = []
        limit = self._num_chars - num_held_chars
        while self._resolved and (self._resolved[0].end <= limit or len(self._resolved) > _MAX_HELD_TOKENS):
            entries.append(self._resolved.popleft())
        return entries

    def take_all(self) -> list[_Entry]:
        entries = [*self._resolved, *(_Entry(*waiting, self._num_chars) for waiting in self._unresolved)]
        self._resolved.clear()
        self._unresolved.clear()
        return entries


class ChoiceText:
    """One choice of a request, from its first token to its end. Tokens after the end are ignored."""

    def __init__(self, choice_idx: int, token_texts: TokenTexts, context: Sequence[int], options: TextOptions) -> None:
        self._choice_idx = choice_idx
        self._options = options
        self._token_texts = token_texts
        self._is_plain = options.return_text and not options.stops
        self._needs_text = options.return_text or bool(options.stops)
        self._detokenizer = Detokenizer(
            token_texts, context, skip_special_tokens=options.skip_special_tokens, shown_ids=options.shown_ids
        )
        self._scanner = StopScanner(options.stops, include_stop=options.include_stop)
        self._queue = _TokenQueue()
        self._num_given_chars = 0
        self.num_tokens = 0
        self.is_ended = False

    def push(self, event: TokenEvent) -> ChoiceDelta | None:
        """Take the next token; returns what may be shown now, or None."""
        if self.is_ended:
            return None
        assert event.position == self.num_tokens, f"token {event.position} of choice {event.choice_idx} out of order"
        self.num_tokens += 1
        if not self._needs_text:
            return self._without_text(event)
        if event.finish_reason is None and self._is_plain:
            return self._plain(event.token)
        text, hidden_text = self._texts(event)
        self._queue.push(event.token, text, hidden_text, is_waiting=self._detokenizer.is_waiting)
        return self._show(event, self._scan(text, hidden_text))

    def abort(self) -> ChoiceDelta | None:
        """End the choice where it is; what was held is shown."""
        if self.is_ended:
            return None
        tail = self._scanner.flush() + self._detokenizer.flush() if self._needs_text else ""
        return self._ended(tail, ChoiceEnd(None, self.num_tokens), self._queue.take_all())

    def _plain(self, token: SampledToken) -> ChoiceDelta | None:
        """Most tokens: nothing looks for stop strings, so each leaves as soon as its text is complete."""
        text = self._detokenizer.push(token.token_id)
        if self._queue.is_empty and not self._detokenizer.is_waiting:
            self._num_given_chars += len(text)
            return ChoiceDelta(self._choice_idx, (token,), text, None, (self._queue.pass_by(text),))
        self._queue.push(token, text, "", is_waiting=self._detokenizer.is_waiting)
        entries = self._queue.take(0)
        return self._delta(entries, text) if entries or text else None

    def _scan(self, text: str, hidden_text: str) -> Scan:
        may_stop = self.num_tokens >= self._options.min_tokens
        scan = self._scanner.push(text, may_stop=may_stop)
        if scan.matched is not None or not hidden_text:
            return scan
        hidden = self._scanner.push(hidden_text, may_stop=may_stop, is_shown=False)
        return Scan(scan.text + hidden.text, hidden.matched)

    def _show(self, event: TokenEvent, scan: Scan) -> ChoiceDelta | None:
        if scan.matched is not None:
            end = ChoiceEnd(FinishReason.STOP, self.num_tokens, stop_string=scan.matched)
            return self._ended(scan.text, end, self._queue.take_all())
        if event.finish_reason is not None:
            text = scan.text + self._scanner.flush()
            return self._ended(text, self._end_of(event), self._queue.take_all())
        entries = self._queue.take(self._scanner.num_held)
        return self._delta(entries, scan.text) if entries or scan.text else None

    def _texts(self, event: TokenEvent) -> tuple[str, str]:
        """Text that the token completes, and text that it only spells: stop strings may hold special tokens.

        The last token also ends whatever was incomplete; a token that ends the choice is no part of the text.
        """
        token_id, is_stop = event.token.token_id, event.finish_reason is FinishReason.STOP
        is_hidden = self._detokenizer.hides(token_id) or (is_stop and not self._options.include_stop)
        is_spelled = is_hidden and token_id in self._token_texts.special_ids and bool(self._options.stops)
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        return text, self._token_texts.text(token_id) if is_spelled else ""

    def _end_of(self, event: TokenEvent) -> ChoiceEnd:
        token_id = event.token.token_id
        is_stop_token = event.finish_reason is FinishReason.STOP and token_id in self._options.stop_token_ids
        return ChoiceEnd(event.finish_reason, self.num_tokens, stop_token_id=token_id if is_stop_token else None)

    def _without_text(self, event: TokenEvent) -> ChoiceDelta:
        entries = [_Entry(event.token, 0, 0)]
        if event.finish_reason is not None:
            return self._ended("", self._end_of(event), entries)
        return self._delta(entries, "")

    def _delta(self, entries: Sequence[_Entry], text: str, end: ChoiceEnd | None = None) -> ChoiceDelta:
        text = text if self._options.return_text else ""
        self._num_given_chars += len(text)
        offsets = tuple(min(entry.offset, self._num_given_chars) for entry in entries)
        return ChoiceDelta(self._choice_idx, tuple(entry.token for entry in entries), text, end, offsets)

    def _ended(self, text: str, end: ChoiceEnd, entries: Sequence[_Entry]) -> ChoiceDelta:
        self.is_ended = True
        return self._delta(entries, text, end)


class HiddenChoice:
    """A choice of which nothing is shown but its end: the client wants its prompt alone."""

    num_tokens = 0

    def __init__(self, choice_idx: int) -> None:
        self._choice_idx = choice_idx
        self.is_ended = False

    def push(self, _: TokenEvent) -> ChoiceDelta | None:
        """As `ChoiceText.push`; its first token ends it, as no token would have."""
        return None if self.is_ended else self._ended(FinishReason.LENGTH)

    def abort(self) -> ChoiceDelta | None:
        """As `ChoiceText.abort`."""
        return None if self.is_ended else self._ended(None)

    def _ended(self, reason: FinishReason | None) -> ChoiceDelta:
        self.is_ended = True
        return ChoiceDelta(self._choice_idx, (), "", ChoiceEnd(reason, 0))
