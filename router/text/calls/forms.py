"""How calls are written: what a guided output is held to, in the form that the model was trained on. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.text.calls import bodies
from router.text.calls.harmony import CHANNEL, CONSTRAIN, MESSAGE

# Stand for the name and the arguments of a call.
NAME, ARGUMENTS = "%NAME", "%ARGUMENTS"


@dataclass(frozen=True, slots=True)
class CallForm:
    """begin, the calls with `between` between them, end. `trigger`: text that holds it begins a call; "" = only an
    answer's beginning does.
    """

    call: str
    trigger: str
    begin: str = ""
    between: str = ""
    end: str = ""


_OBJECT = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm(f"<tool_call>\n{_OBJECT}\n</tool_call>", "<tool_call>", between="\n"),
    "llama3_json": CallForm(_OBJECT.replace("arguments", "parameters"), "", between="; "),
    "mistral": CallForm(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", "[TOOL_CALLS]"),
    "mistral_array": CallForm(_OBJECT, "[TOOL_CALLS]", begin="[TOOL_CALLS] [", between=", ", end="]"),
    "deepseek": CallForm(
        f"{bodies.DEEPSEEK_CALL}{NAME}{bodies.DEEPSEEK_SEPARATOR}{ARGUMENTS}{bodies.DEEPSEEK_CALL_END}",
        bodies.DEEPSEEK_BEGIN,
        begin=bodies.DEEPSEEK_BEGIN,
        end=bodies.DEEPSEEK_END,
    ),
    "deepseek_v3": CallForm(
        f"{bodies.DEEPSEEK_CALL}function{bodies.DEEPSEEK_SEPARATOR}{NAME}\n```json\n{ARGUMENTS}\n```"
        f"{bodies.DEEPSEEK_CALL_END}",
        bodies.DEEPSEEK_BEGIN,
        begin=bodies.DEEPSEEK_BEGIN,
        between="\n",
        end=bodies.DEEPSEEK_END,
    ),
    "harmony": CallForm(f"{CHANNEL}commentary to=functions.{NAME} {CONSTRAIN}json{MESSAGE}{ARGUMENTS}", CHANNEL),
}


def form_of(tool_parser: str, template: str) -> CallForm:
    """Of the two that a family knew in the course of time, the one that the template writes."""
    if tool_parser == "mistral" and "[ARGS]" not in template:
        return FORMS["mistral_array"]
    if tool_parser == "deepseek" and "```json" in template:
        return FORMS["deepseek_v3"]
    return FORMS[tool_parser]
