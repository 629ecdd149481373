"""Writes updates of a request in the forms of the OpenAI API. Pure: no IO.

A `Renderer` per kind of endpoint; the rest of the HTTP front end does not know chats from completions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, UnsetType

from common.values.request import SampledToken
from router.front.openai.responses import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    FunctionDelta,
    PromptLogprob,
    PromptTokens,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from router.front.scored_prompt import ScoredPrompt, ScoredToken
from router.text.calls.choice import joined_calls
from router.text.choice_text import CallPart, ChoiceDelta, ChoiceEnd
from router.text.token_text import TokenTexts

# What clients know as "no value": JSON has no infinity.
_NO_LOGPROB = -9999.0
AnyChoice = CompletionChoice | ChatChoice | ChatChunkChoice


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is sent at once: its parts so far."""

    index: int
    prompt: ScoredPrompt
    texts: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)
    end: ChoiceEnd | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.offsets += delta.offsets
        self.reasonings.append(delta.reasoning)
        self.calls += delta.calls
        self.end = delta.end or self.end


@dataclass(frozen=True, slots=True)
class RenderOptions:
    has_logprobs: bool = False
    num_top_logprobs: int = 0
    num_prompt_logprobs: int | None = None
    return_token_ids: bool = False
    has_reasoning: bool = True

    @property
    def tells_tokens(self) -> bool:
        """Whether the client hears of single tokens, not of text alone."""
        return self.has_logprobs or self.return_token_ids


class Renderer(Protocol):
    """Of one HTTP request. A choice is either streamed (`opening`, then `chunk`s) or rendered whole."""

    whole_object: str
    chunk_object: str
    tells_tokens: bool

    def opening(self, index: int, prompt: ScoredPrompt) -> Iterator[AnyChoice]:
        """What comes before the first output of a streamed choice."""
        ...

    def chunks(self, index: int, delta: ChoiceDelta, prompt: ScoredPrompt) -> Sequence[AnyChoice]: ...

    def whole(self, choice: WholeChoice) -> AnyChoice: ...


class ChatRenderer:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, options: RenderOptions, token_texts: TokenTexts) -> None:
        self._options = options
        self._token_texts = token_texts
        self.tells_tokens = options.tells_tokens

    def opening(self, index: int, prompt: ScoredPrompt) -> Iterator[AnyChoice]:
        yield ChatChunkChoice(index, ChatDelta(content="", role="assistant"), None, None)

    def chunks(self, index: int, delta: ChoiceDelta, prompt: ScoredPrompt) -> Sequence[ChatChunkChoice]:
        """One for what is said, one for each piece of a call. The tokens go with the first, the end with the last.

        None where there is nothing to say: of a marker's tokens, unless the client wants to hear of every token.
        """
        if not (self.tells_tokens or delta.end or delta.text or self._shown(delta.reasoning) or delta.calls):
            return []
        parts = self._parts(delta)
        chunks = [ChatChunkChoice(index, part, None, None) for part in parts]
        first, last = chunks[0], chunks[-1]
        first.logprobs = self._logprobs(delta.tokens)
        first.token_ids = token_ids_of(delta.tokens, self._options)
        last.finish_reason = finish_reason_of(delta.end)
        last.stop_reason = UNSET if delta.end is None else stop_reason_of(delta.end)
        return chunks

    def _parts(self, delta: ChoiceDelta) -> list[ChatDelta]:
        calls = [ChatDelta(tool_calls=[_call_delta(part)]) for part in delta.calls]
        reasoning = self._shown(delta.reasoning)
        if calls and not (delta.text or reasoning):
            return calls
        content = UNSET if reasoning and not delta.text else delta.text
        return [ChatDelta(content=content, reasoning=reasoning, reasoning_content=reasoning), *calls]

    def _shown(self, reasoning: str) -> str | UnsetType:
        return reasoning if reasoning and self._options.has_reasoning else UNSET

    def _message(self, choice: WholeChoice) -> ChatMessage:
        """Without content when there is something else."""
        text, reasoning = "".join(choice.texts), "".join(choice.reasonings)
        calls = [ToolCall(call.call_id, FunctionCall(call.arguments, call.name)) for call in joined_calls(choice.calls)]
        shown = self._shown(reasoning)
        return ChatMessage(
            content=None if not text and (calls or reasoning) else text,
            reasoning=shown,
            reasoning_content=shown,
            tool_calls=calls or UNSET,
        )

    def whole(self, choice: WholeChoice) -> ChatChoice:
        return ChatChoice(
            choice.index,
            self._message(choice),
            self._logprobs(choice.tokens),
            finish_reason_of(choice.end),
            stop_reason_of(choice.end),
            token_ids_of(choice.tokens, self._options),
        )

    def _logprobs(self, tokens: Sequence[SampledToken]) -> ChatLogprobs | None:
        if not self._options.has_logprobs:
            return None
        num_top = self._options.num_top_logprobs
        return ChatLogprobs([token_logprob_of(token, num_top, self._token_texts) for token in tokens])


class CompletionRenderer:
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, options: RenderOptions, token_texts: TokenTexts) -> None:
        self._options = options
        self._token_texts = token_texts
        self.tells_tokens = options.tells_tokens

    def opening(self, index: int, prompt: ScoredPrompt) -> Iterator[AnyChoice]:
        if prompt.offsets and self._options.has_logprobs:
            yield from self._scored_parts(index, prompt)
        elif prompt.text:
            yield CompletionChoice(index, prompt.text, None, None, None)

    def _scored_parts(self, index: int, prompt: ScoredPrompt) -> Iterator[CompletionChoice]:
        """The prompt in parts, each with the text of its tokens."""
        begin, first = 0, 0
        for part in prompt.parts():
            after = first + len(part)
            end = prompt.offsets[after] if after < len(prompt.offsets) else len(prompt.text)
            logprobs = self._logprobs(part, prompt.offsets[first:after])
            yield CompletionChoice(index, prompt.text[begin:end], logprobs, None, None)
            begin, first = end, after

    def chunks(self, index: int, delta: ChoiceDelta, prompt: ScoredPrompt) -> Sequence[CompletionChoice]:
        choice = CompletionChoice(
            index,
            delta.text,
            self._logprobs(delta.tokens, _moved(delta.offsets, prompt)),
            finish_reason_of(delta.end),
            stop_reason_of(delta.end),
            token_ids_of(delta.tokens, self._options),
        )
        return [choice]

    def whole(self, choice: WholeChoice) -> CompletionChoice:
        return CompletionChoice(
            choice.index,
            choice.prompt.text + "".join(choice.texts),
            self._whole_logprobs(choice),
            finish_reason_of(choice.end),
            stop_reason_of(choice.end),
            token_ids_of(choice.tokens, self._options),
            prompt_logprobs=prompt_logprobs_of(choice.prompt, self._options.num_prompt_logprobs, self._token_texts),
        )

    def _whole_logprobs(self, choice: WholeChoice) -> CompletionLogprobs | None:
        offsets = _moved(choice.offsets, choice.prompt)
        if not (choice.prompt.offsets and self._options.has_logprobs):
            return self._logprobs(choice.tokens, offsets)
        return self._logprobs([*choice.prompt.tokens(), *choice.tokens], [*choice.prompt.offsets, *offsets])

    def _logprobs(
        self, tokens: Sequence[SampledToken | ScoredToken], offsets: Sequence[int]
    ) -> CompletionLogprobs | None:
        if not self._options.has_logprobs:
            return None
        texts = [self._token_texts.text(token.token_id) for token in tokens]
        logprobs = [None if _is_first(token) else _finite(token.logprob) for token in tokens]
        return CompletionLogprobs(texts, logprobs, self._top_logprobs(tokens), list(offsets))

    def _top_logprobs(self, tokens: Sequence[SampledToken | ScoredToken]) -> list[dict[str, float] | None] | None:
        if self._options.num_top_logprobs == 0:
            return None
        return [None if _is_first(token) else self._top(token) for token in tokens]

    def _top(self, token: SampledToken | ScoredToken) -> dict[str, float]:
        """Best first, and the token itself wherever it ranks, as OpenAI tells. Of equal texts: its own, or the best."""
        text = self._token_texts.text
        logprobs: dict[str, float] = {}
        for token_id, logprob in token.top[: self._options.num_top_logprobs]:
            logprobs.setdefault(text(token_id), _finite(logprob))
        return {**logprobs, text(token.token_id): _finite(token.logprob)}


def token_logprob_of(token: SampledToken, num_top: int, texts: TokenTexts) -> TokenLogprob:
    top = [
        TopLogprob(texts.text(token_id), _finite(logprob), list(texts.raw(token_id)))
        for token_id, logprob in token.top[:num_top]
    ]
    return TokenLogprob(texts.text(token.token_id), _finite(token.logprob), list(texts.raw(token.token_id)), top)


def prompt_logprobs_of(prompt: ScoredPrompt, num_top: int | None, token_texts: TokenTexts) -> PromptTokens | UnsetType:
    """vLLM's form of a prompt's logprobs, where they are asked for."""
    if num_top is None:
        return UNSET
    tokens: PromptTokens = []
    for token in prompt.tokens():
        best = {
            token_id: PromptLogprob(_finite(logprob), rank, token_texts.text(token_id))
            for rank, (token_id, logprob) in enumerate(token.top[:num_top], 1)
        }
        own = PromptLogprob(_finite(token.logprob), token.rank, token_texts.text(token.token_id))
        tokens.append(None if _is_first(token) else {token.token_id: own, **best})
    return tokens


def _is_first(token: SampledToken | ScoredToken) -> bool:
    """Of a prompt: nothing comes before it that could make it likely."""
    return isinstance(token, ScoredToken) and token.logprob is None


def _moved(offsets: Sequence[int], prompt: ScoredPrompt) -> list[int]:
    """Places in the output as places in the text that begins with the prompt."""
    return [len(prompt.text) + offset for offset in offsets]


def finish_reason_of(end: ChoiceEnd | None) -> str | None:
    """None for a choice that was aborted: OpenAI's API has no word for that, and the answer ends with an error."""
    if end is None or end.reason is None:
        return None
    return "tool_calls" if end.waits_for_results else end.reason.value


def _call_delta(part: CallPart) -> ToolCallDelta:
    if not part.name:
        return ToolCallDelta(part.index, FunctionDelta(part.arguments))
    return ToolCallDelta(part.index, FunctionDelta(part.arguments, part.name), part.call_id, "function")


def stop_reason_of(end: ChoiceEnd | None) -> str | int | None:
    """What the client itself asked to stop at, when that ended the choice."""
    if end is None:
        return None
    return end.stop_string if end.stop_string is not None else end.stop_token_id


def token_ids_of(tokens: Sequence[SampledToken], options: RenderOptions) -> list[int] | UnsetType:
    return [token.token_id for token in tokens] if options.return_token_ids else UNSET


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _NO_LOGPROB else _NO_LOGPROB


AnyAnswer = Answer[CompletionChoice] | Answer[ChatChoice] | Answer[ChatChunkChoice]
