"""Answers as models of each family write them, and what they are made of."""

import json
from dataclasses import dataclass, field
from typing import Any

from router.text.calls import bodies
from router.text.calls.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from router.text.calls.parser import Format, OutputParser, Thinking
from router.text.calls.reader import Kind, Piece

ARGUMENTS = {"city": 'Sã"o\n', "days": [1, 2.5e3, {"a": None}], "deep": {"x": {"y": []}, "z": True}}
TEXT = json.dumps(ARGUMENTS)
SPACED = json.dumps(ARGUMENTS, indent=2, ensure_ascii=False)
_B, _E = bodies.DEEPSEEK_BEGIN, bodies.DEEPSEEK_END
_CB, _CE, _S = bodies.DEEPSEEK_CALL, bodies.DEEPSEEK_CALL_END, bodies.DEEPSEEK_SEPARATOR


@dataclass(frozen=True)
class Answer:
    name: str
    tools: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""
    parser: str = ""  # of reasoning
    thinking: Thinking = Thinking.UNKNOWN
    is_late: bool = False  # the arguments are known at their end only
    names: frozenset[str] = field(default_factory=lambda: frozenset({"f", "g"}))

    def form(self, *, is_whole: bool) -> Format:
        return Format(self.tools, self.parser, self.thinking, self.names, is_whole)


def _object(name: str, text: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {text}}}'


def _harmony(header: str, text: str) -> str:
    return f"{START}assistant{CHANNEL}{header}{MESSAGE}{text}"


_F, _G = ("f", ARGUMENTS), ("g", {})
ANSWERS = (
    Answer("text", "hermes", "Plain < text <tool_cal> [TOOL", "Plain < text <tool_cal> [TOOL"),
    Answer("hermes", "hermes", f"<tool_call>\n{_object('f', TEXT)}\n</tool_call>", calls=(_F,)),
    Answer("hermes after text", "hermes", f"Let me see. \n\n<tool_call>{_object('f', SPACED)}</tool_call>",
           "Let me see.", (_F,)),
    Answer("hermes twice", "hermes",
           f"<tool_call>\n{_object('f', TEXT)}\n</tool_call>\n<tool_call>\n{_object('g', '{}')}\n</tool_call>",
           calls=(_F, _G)),
    Answer("hermes and text after", "hermes", f"<tool_call>{_object('f', TEXT)}</tool_call> Done.", "Done.", (_F,)),
    Answer("hermes, arguments first", "hermes", f'<tool_call>{{"arguments": {TEXT}, "id": 7, "name": "f"}}</tool_call>',
           calls=(_F,), is_late=True),
    Answer("hermes, arguments as text", "hermes", f"<tool_call>{_object('f', json.dumps(TEXT))}</tool_call>",
           calls=(_F,), is_late=True),
    Answer("hermes, no arguments", "hermes", '<tool_call>{"name": "g"}</tool_call>', calls=(_G,)),
    Answer("hermes, null", "hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', calls=(_G,)),
    Answer("hermes, not closed", "hermes", f"<tool_call>{_object('f', TEXT)}", calls=(_F,)),
    Answer("qwen3", "hermes", f"<think>\nIs it {{a}}?\n</think>\n\n<tool_call>\n{_object('f', TEXT)}\n</tool_call>",
           "", (_F,), "Is it {a}?", "think"),
    Answer("thought opened by the prompt", "hermes", "So </thin k> it is.\n</think>\n\nYes.", "Yes.", (),
           "So </thin k> it is.", "think", Thinking.OPEN),
    Answer("thought closed by the prompt", "", "<think> is a tag.", "<think> is a tag.", (), "", "think",
           Thinking.CLOSED),
    Answer("no thought", "", " Yes <think>.", " Yes <think>.", (), "", "think"),
    Answer("llama", "llama3_json", f"<|python_tag|>{_object('f', TEXT, 'parameters')}", calls=(_F,)),
    Answer("llama, bare", "llama3_json", f" {_object('f', TEXT, 'parameters')}; {_object('g', '{}', 'parameters')}",
           calls=(_F, _G)),
    Answer("llama, with a type", "llama3_json", f'{{"type": "function", {_object("f", TEXT, "parameters")[1:]}',
           calls=(_F,)),
    Answer("llama, other JSON", "llama3_json", '{"city": "Paris", "name": "f"}', '{"city": "Paris", "name": "f"}'),
    Answer("llama, no tool", "llama3_json", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}'),
    Answer("llama, code", "llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Answer("mistral, list", "mistral", f"[TOOL_CALLS] [{_object('f', TEXT)}, {_object('g', '{}')}]", calls=(_F, _G)),
    Answer("mistral", "mistral", f"I look.[TOOL_CALLS]f[ARGS]{TEXT}[TOOL_CALLS]g[ARGS]{{}}", "I look.", (_F, _G)),
    Answer("mistral, with an id", "mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{TEXT}", calls=(_F,)),
    Answer("deepseek v3", "deepseek",
           f"Hm.{_B}{_CB}function{_S}f\n```json\n{SPACED}\n```{_CE}\n{_CB}function{_S}g\n```json\n{{}}\n```{_CE}{_E}",
           "Hm.", (_F, _G)),
    Answer("deepseek v3.1", "deepseek", f"So</think>Ok{_B}{_CB}f{_S}{TEXT}{_CE}{_CB}g{_S}{{}}{_CE}{_E}",
           "Ok", (_F, _G), "So", "think", Thinking.OPEN),
    Answer("harmony", "harmony",
           f"{CHANNEL}analysis{MESSAGE}A <b>.{END}{_harmony('commentary', 'I look.')}{END}"
           f"{_harmony(f'commentary to=functions.f {CONSTRAIN}json', TEXT)}{CALL}",
           "I look.", (_F,), "A <b>.", "harmony"),
    Answer("harmony, recipient first", "harmony", f" to=functions.f{CHANNEL}commentary{CONSTRAIN}json{MESSAGE}{TEXT}",
           "", (_F,), "", "harmony"),
    Answer("harmony, final", "harmony", f"{CHANNEL}analysis{MESSAGE}A.{END}{_harmony('final', 'Yes.')}{RETURN}",
           "Yes.", (), "A.", "harmony"),
)  # fmt: skip


def parsed(form: Format, parts: list[str], *, is_cut: bool = False) -> list[Piece]:
    """All pieces of an answer that comes in `parts`."""
    parser = OutputParser(form)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return pieces + parser.finish(is_cut=is_cut)


def summed(pieces: list[Piece]) -> tuple[str, str, list[list[str | bool]]]:
    """Content, reasoning, and of each call the name, the arguments and whether it is complete."""
    content, reasoning, calls = "", "", list[list[str | bool]]()
    for kind, text in pieces:
        match kind:
            case Kind.CONTENT:
                content += text
            case Kind.REASONING:
                reasoning += text
            case Kind.NAME:
                calls.append([text, "", False])
            case Kind.ARGUMENTS:
                calls[-1][1] = str(calls[-1][1]) + text
            case Kind.CALL_END:
                calls[-1][2] = True
    return content, reasoning, calls
