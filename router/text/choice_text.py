"""Turns the tokens of one choice into text as they come: detokenizes, and ends the choice at a stop string. No IO.

A token is released together with its text: not while its bytes are half a character, not while its text may become
a stop string. So the text and the token ids that a client gets always belong together.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from common.values.request import FinishReason, SampledToken, TokenEvent
from router.text.stop_strings import StopScanner

# No character is longer than four tokens of one byte each; a longer wait means bytes that are no text.
_MAX_PENDING_TOKENS = 8
# Enough for decoders that look at the token before (a leading space is dropped at the start of a text only).
_NUM_CONTEXT_TOKENS = 4
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


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why a choice ended; at most one of the two matches is set. `reason` None: it was aborted."""

    reason: FinishReason | None
    num_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice: tokens and their text, and how it ended when this is the last."""

    choice_idx: int
    tokens: tuple[SampledToken, ...]
    text: str
    end: ChoiceEnd | None = None


class Detokenizer:
    """Incremental: `push` returns only whole characters, `flush` the rest without an incomplete one."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(context[-_NUM_CONTEXT_TOKENS:])
        self._num_shown = len(self._ids)
        self._shown = self._decode(self._ids).rstrip(_REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Text that this token completes, often none."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._shown):
            return ""
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._num_shown < _MAX_PENDING_TOKENS:
            return ""
        new_text = text[len(self._shown) :]
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._decode(self._ids)
        return new_text

    def flush(self) -> str:
        """The end of the text. Half a character at the very end is no text."""
        return self._decode(self._ids)[len(self._shown) :].rstrip(_REPLACEMENT)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))


class _TokenQueue:
    """Tokens in order, each with the end of its text; a token leaves when all its text is shown."""

    def __init__(self) -> None:
        self._unresolved: list[SampledToken] = []  # their text is not complete yet
        self._resolved: deque[tuple[int, SampledToken]] = deque()
        self._num_chars = 0

    def push(self, token: SampledToken, new_text: str) -> None:
        self._unresolved.append(token)
        if new_text:
            self._num_chars += len(new_text)
            self._resolved.extend((self._num_chars, waiting) for waiting in self._unresolved)
            self._unresolved.clear()

    def take(self, num_held_chars: int) -> tuple[SampledToken, ...]:
        """Tokens whose text is shown when the last `num_held_chars` are not."""
        tokens = []
        while self._resolved and self._resolved[0][0] <= self._num_chars - num_held_chars:
            tokens.append(self._resolved.popleft()[1])
        return tuple(tokens)

    def take_all(self) -> tuple[SampledToken, ...]:
        tokens = (*(token for _, token in self._resolved), *self._unresolved)
        self._resolved.clear()
        self._unresolved.clear()
        return tokens


class ChoiceText:
    """One choice of a request, from its first token to its end. Tokens after the end are ignored."""

    def __init__(self, choice_idx: int, tokenizer: Tokenizer, context: Sequence[int], options: TextOptions) -> None:
        self._choice_idx = choice_idx
        self._options = options
        self._needs_text = options.return_text or bool(options.stops)
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=options.skip_special_tokens)
        self._scanner = StopScanner(options.stops, include_stop=options.include_stop)
        self._queue = _TokenQueue()
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
        new_text = self._new_text(event)
        self._queue.push(event.token, new_text)
        return self._show(event, new_text)

    def abort(self) -> ChoiceDelta | None:
        """End the choice where it is; what was held is shown."""
        if self.is_ended:
            return None
        tail = self._scanner.flush() + self._detokenizer.flush() if self._needs_text else ""
        return self._ended(tail, ChoiceEnd(None, self.num_tokens), self._queue.take_all())

    def _show(self, event: TokenEvent, new_text: str) -> ChoiceDelta | None:
        scan = self._scanner.push(new_text, may_stop=self.num_tokens >= self._options.min_tokens)
        if scan.matched is not None:
            end = ChoiceEnd(FinishReason.STOP, self.num_tokens, stop_string=scan.matched)
            return self._ended(scan.text, end, self._queue.take_all())
        if event.finish_reason is not None:
            text = scan.text + self._scanner.flush()
            return self._ended(text, self._end_of(event), self._queue.take_all())
        tokens = self._queue.take(self._scanner.num_held)
        return self._delta(tokens, scan.text) if tokens or scan.text else None

    def _new_text(self, event: TokenEvent) -> str:
        """Text that the token completes; the last token also ends whatever was incomplete."""
        if event.finish_reason is None:
            return self._detokenizer.push(event.token.token_id)
        if event.finish_reason is FinishReason.STOP and not self._options.include_stop:
            return self._detokenizer.flush()  # a stop token is no part of the text
        return self._detokenizer.push(event.token.token_id) + self._detokenizer.flush()

    def _end_of(self, event: TokenEvent) -> ChoiceEnd:
        token_id = event.token.token_id
        is_stop_token = event.finish_reason is FinishReason.STOP and token_id in self._options.stop_token_ids
        return ChoiceEnd(event.finish_reason, self.num_tokens, stop_token_id=token_id if is_stop_token else None)

    def _without_text(self, event: TokenEvent) -> ChoiceDelta:
        if event.finish_reason is not None:
            return self._ended("", self._end_of(event), (event.token,))
        return self._delta((event.token,), "")

    def _delta(self, tokens: tuple[SampledToken, ...], text: str, end: ChoiceEnd | None = None) -> ChoiceDelta:
        return ChoiceDelta(self._choice_idx, tokens, text if self._options.return_text else "", end)

    def _ended(self, text: str, end: ChoiceEnd, tokens: tuple[SampledToken, ...]) -> ChoiceDelta:
        self.is_ended = True
        return self._delta(tokens, text, end)
