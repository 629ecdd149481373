"""Writes updates of a request as items and events of the Responses API. Pure: no IO."""

from collections.abc import Sequence
from typing import Any

import msgspec

from common.values.request import FinishReason, SamplingParams
from router.front.openai.items.answers import (
    CallOutput,
    IncompleteDetails,
    InputTokensDetails,
    MessageOutput,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningOutput,
    ReasoningText,
    ResponseAnswer,
    ResponseUsage,
    Status,
)
from router.front.openai.items.requests import ResponseBody
from router.front.openai.items.specs import has_logprobs
from router.front.openai.render import token_logprob_of
from router.front.openai.responses import TokenLogprob
from router.front.output import Summary
from router.text.choice_text import CallPart, ChoiceDelta, ChoiceEnd
from router.text.token_text import TokenTexts

Event = dict[str, Any]  # as it is written, but for its number


class ItemWriter:
    """The items of one response. An item ends where another begins, so at most the last one is open.

    `num_top`: of the logprobs of each token; None = no logprobs. `item_ids` end with `suffix`.
    """

    def __init__(self, suffix: str, num_top: int | None, token_texts: TokenTexts) -> None:
        self._suffix = suffix
        self._num_top = num_top
        self._token_texts = token_texts
        self._items: list[OutputItem] = []
        self._is_open = False
        self._parts: list[str] = []  # of the item that is open
        self._logprobs: list[TokenLogprob] = []
        self._space = ""  # with which no message has begun: most often the space between a thought and a call
        self._space_logprobs: list[TokenLogprob] = []
        self._end: ChoiceEnd | None = None
        self._num_reasoning_tokens = 0

    def push(self, delta: ChoiceDelta) -> list[Event]:
        """What is new, in order."""
        events: list[Event] = []
        if delta.reasoning:
            self._num_reasoning_tokens += len(delta.tokens)
            events += self._reasoning(delta.reasoning)
        if delta.text:
            events += self._text(delta)
        for part in delta.calls:
            events += self._call(part)
        if delta.end is not None:
            self._end = delta.end
            events += self._last(delta.end)
        return events

    def finished(self, answer: ResponseAnswer, summary: Summary, completed_s: int) -> ResponseAnswer:
        """The whole response, of one that began as `answer`."""
        is_cut = self._end is not None and self._end.reason is FinishReason.LENGTH
        return msgspec.structs.replace(
            answer,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else completed_s,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=_usage_of(summary, self._num_reasoning_tokens),
        )

    def _reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not (self._is_open and isinstance(self._items[-1], ReasoningOutput)):
            events += self._begin(ReasoningOutput(self._id("rs"), "in_progress", []))
            events.append(self._event("response.content_part.added", content_index=0, part=ReasoningText("")))
        self._parts.append(text)
        return [*events, self._event("response.reasoning_text.delta", content_index=0, delta=text)]

    def _text(self, delta: ChoiceDelta) -> list[Event]:
        events: list[Event] = []
        text = self._space + delta.text
        self._space_logprobs += self._logprobs_of(delta)
        if not (self._is_open and isinstance(self._items[-1], MessageOutput)):
            if text.isspace():
                self._space = text
                return []
            events += self._begin_message()
        self._space = ""
        logprobs, self._space_logprobs = self._space_logprobs, []
        self._parts.append(text)
        self._logprobs += logprobs
        return [*events, self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _begin_message(self) -> list[Event]:
        events = self._begin(MessageOutput(self._id("msg"), "in_progress", []))
        return [*events, self._event("response.content_part.added", content_index=0, part=OutputText("", []))]

    def _call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name:
            events += self._begin(CallOutput(self._id("fc"), "in_progress", part.call_id, part.name, ""))
        if part.arguments:
            self._parts.append(part.arguments)
            events.append(self._event("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def _last(self, end: ChoiceEnd) -> list[Event]:
        """A response has one item at least, if it says nothing."""
        events = [] if self._items else self._begin_message()
        return events + self._close("incomplete" if end.reason is FinishReason.LENGTH else "completed")

    def _begin(self, item: OutputItem) -> list[Event]:
        events = self._close("completed")
        self._items.append(item)
        self._is_open, self._parts, self._logprobs = True, [], []
        added: Event = {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": item}
        return [*events, added]

    def _close(self, status: Status) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        text, begun = "".join(self._parts), self._items[-1]
        item, events = self._ended(begun, text, status)
        self._items[-1] = item
        done: Event = {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}
        return [*events, done]

    def _ended(self, begun: OutputItem, text: str, status: Status) -> tuple[OutputItem, list[Event]]:
        part: OutputText | ReasoningText
        match begun:
            case CallOutput():
                done = self._event("response.function_call_arguments.done", name=begun.name, arguments=text)
                return msgspec.structs.replace(begun, status=status, arguments=text), [done]
            case ReasoningOutput():
                part = ReasoningText(text)
                done = self._event("response.reasoning_text.done", content_index=0, text=text)
            case MessageOutput():
                part = OutputText(text, self._logprobs)
                done = self._event("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        part_done = self._event("response.content_part.done", content_index=0, part=part)
        return msgspec.structs.replace(begun, status=status, content=[part]), [done, part_done]

    def _event(self, kind: str, **fields: Any) -> Event:
        """Of the last item."""
        return {"type": kind, "item_id": self._items[-1].id, "output_index": len(self._items) - 1, **fields}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}{len(self._items)}"

    def _logprobs_of(self, delta: ChoiceDelta) -> list[TokenLogprob]:
        if self._num_top is None:
            return []
        return [token_logprob_of(token, self._num_top, self._token_texts) for token in delta.tokens]


def begun_answer(
    body: ResponseBody, response_id: str, created_s: int, model_name: str, sampling: SamplingParams
) -> ResponseAnswer:
    """Before anything is there."""
    return ResponseAnswer(
        id=response_id,
        created_at=created_s,
        model=model_name,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        top_logprobs=body.top_logprobs or 0,
        text={"format": _format_of(body), "verbosity": "medium"},
        tool_choice=_stated(body.tool_choice) if body.tool_choice else "auto",
        tools=_tools_of(body.tools or ()),
        metadata=body.metadata or {},
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


def num_top_logprobs(body: ResponseBody) -> int | None:
    """None: no logprobs are wanted."""
    return (body.top_logprobs or 0) if has_logprobs(body) else None


def _format_of(body: ResponseBody) -> Any:
    stated = body.text and body.text.format
    return {"type": "text"} if not stated else _stated(stated)


def _tools_of(stated: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the body have been checked."""
    absent = {"description": None, "parameters": None, "strict": False}
    return [{**absent, **tool, "strict": bool(tool.get("strict"))} for tool in stated]


def _stated(value: object) -> Any:
    """Without what was not."""
    built = msgspec.to_builtins(value)
    return {key: each for key, each in built.items() if each is not None} if isinstance(built, dict) else built


def _usage_of(summary: Summary, num_reasoning_tokens: int) -> ResponseUsage:
    num_input, num_output = summary.num_prompt_tokens, summary.num_completion_tokens
    return ResponseUsage(
        num_input,
        InputTokensDetails(summary.num_cached_tokens),
        num_output,
        OutputTokensDetails(num_reasoning_tokens),
        num_input + num_output,
    )
