"""Rows of the official `openai` client, run in an environment that has nothing else: everything we offer, and refusals.

Prints a JSON line per row: name, and what went wrong (empty = nothing). Arguments: the base URL, the model.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai
import pydantic

URL, MODEL = sys.argv[1:3]
client: Any = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=300)
USER = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    population: int = pydantic.Field(ge=0, le=100_000_000)


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = client.chat.completions.create(messages=USER, **GREEDY)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def chat_stream_with_usage() -> None:
    whole = client.chat.completions.create(messages=USER, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=USER, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_stream_helper() -> None:
    with client.chat.completions.stream(messages=USER, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "Paris" in final.choices[0].message.content


def chat_logprobs() -> None:
    answer = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)


def chat_choices_and_seed() -> None:
    arguments = {
        "messages": USER,
        "model": MODEL,
        "n": 3,
        "seed": 7,
        "temperature": 1.0,
        "max_tokens": 12,
    }
    first, second = (client.chat.completions.create(**arguments) for _ in range(2))
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, second)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def chat_stop() -> None:
    answer = client.chat.completions.create(messages=USER, stop=["Paris"], **GREEDY)
    assert "Paris" not in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"


def chat_json_schema_by_parse() -> None:
    answer = client.chat.completions.parse(messages=USER, response_format=City, **{**GREEDY, "max_tokens": 60})
    assert isinstance(answer.choices[0].message.parsed, City)


def chat_json_object() -> None:
    answer = client.chat.completions.create(
        messages=USER,
        response_format={"type": "json_object"},
        **{**GREEDY, "max_tokens": 200},
    )
    if answer.choices[0].finish_reason == "stop":
        json.loads(answer.choices[0].message.content)


def chat_fields_without_effect() -> None:
    client.chat.completions.create(
        messages=USER, user="u", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="s",
        prompt_cache_key="k", **GREEDY,
    )  # fmt: skip


def tools_forced() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        messages=USER, tools=[TOOL], tool_choice=choice, **{**GREEDY, "max_tokens": 60}
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)


def tools_streamed() -> None:
    stream = client.chat.completions.create(
        messages=USER,
        tools=[TOOL],
        tool_choice="required",
        stream=True,
        **{**GREEDY, "max_tokens": 60},
    )
    parts = [part for chunk in stream for choice in chunk.choices for part in choice.delta.tool_calls or []]
    assert parts[0].function.name == "get_weather"
    for index in {part.index for part in parts}:
        json.loads("".join(part.function.arguments or "" for part in parts if part.index == index))


def tools_auto_and_results() -> None:
    client.chat.completions.create(messages=USER, tools=[TOOL], tool_choice="auto", **GREEDY)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert client.chat.completions.create(messages=history, tools=[TOOL], **GREEDY).choices[0].finish_reason


def completions() -> None:
    arguments = {**GREEDY, "prompt": "The capital of France is", "max_tokens": 8}
    whole = client.completions.create(**arguments)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **arguments))
    assert whole.choices[0].text == text and "Paris" in text


def completions_of_several_prompts() -> None:
    answer = client.completions.create(prompt=["One, two,", "A, B,"], n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def completions_echo_with_logprobs() -> None:
    for max_tokens in (0, 4):
        arguments = {
            "model": MODEL,
            "prompt": "The capital of France is Paris",
            "echo": True,
            "logprobs": 2,
        }
        answer = client.completions.create(max_tokens=max_tokens, **arguments)
        (choice,) = answer.choices
        assert choice.text.startswith(arguments["prompt"])
        logprobs = choice.logprobs
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
        assert "".join(logprobs.tokens) == choice.text
        places = zip(logprobs.tokens, logprobs.text_offset, strict=True)
        assert all(choice.text[offset : offset + len(token)] == token for token, offset in places)


def prompt_logprobs_of_vllm() -> None:
    extra = {"prompt_logprobs": 1}
    completion = client.completions.create(prompt="A B C", extra_body=extra, **GREEDY).choices[0].model_dump()
    assert completion["prompt_logprobs"][0] is None and len(completion["prompt_logprobs"]) > 2
    assert client.chat.completions.create(messages=USER, extra_body=extra, **GREEDY).model_dump()["prompt_logprobs"]


def errors_have_their_classes() -> None:
    for error, arguments in (
        (openai.NotFoundError, {"model": "none", "messages": USER}),
        (openai.BadRequestError, {"model": MODEL, "messages": []}),
        (openai.BadRequestError, {"model": MODEL, "messages": USER, "temperature": 9}),
        (
            openai.BadRequestError,
            {"model": MODEL, "messages": [{"role": "user", "content": "x " * 20_000}]},
        ),
    ):
        try:
            client.chat.completions.create(**arguments)
        except error as raised:
            body: Any = raised.body
            assert body["message"]
        else:
            raise AssertionError(f"no {error.__name__} for {list(arguments)}")


def raw_and_streaming_responses() -> None:
    raw = client.chat.completions.with_raw_response.create(messages=USER, **GREEDY)
    assert raw.headers["x-request-id"] and raw.parse().choices
    with client.chat.completions.with_streaming_response.create(messages=USER, stream=True, **GREEDY) as response:
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


def many_at_once() -> None:
    async def run() -> set[str]:
        async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=300) as at_once:
            create: Any = at_once.chat.completions.create
            answers = await asyncio.gather(*(create(messages=USER, **GREEDY) for _ in range(8)))
        return {answer.choices[0].message.content for answer in answers}

    assert len(asyncio.run(run())) == 1


def a_stream_left_early() -> None:
    stream = client.chat.completions.create(messages=USER, stream=True, **{**GREEDY, "max_tokens": 500})
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(messages=USER, **GREEDY).choices


def embeddings() -> None:
    client.embeddings.create(model=MODEL, input="x")


def responses() -> None:
    client.responses.create(model=MODEL, input="x", max_output_tokens=16)


ROWS: list[Callable[[], None]] = [
    models, chat, chat_stream_with_usage, chat_stream_helper, chat_logprobs, chat_choices_and_seed, chat_stop,
    chat_json_schema_by_parse, chat_json_object, chat_fields_without_effect, completions,
    completions_of_several_prompts, completions_echo_with_logprobs, prompt_logprobs_of_vllm,
    errors_have_their_classes, raw_and_streaming_responses, many_at_once, a_stream_left_early, tools_forced,
    tools_streamed, tools_auto_and_results, embeddings, responses,
]  # fmt: skip


def main() -> None:
    for row in ROWS:
        problem = ""
        try:
            row()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(
            json.dumps({"name": row.__name__.replace("_", " "), "problem": problem}),
            flush=True,
        )


main()
