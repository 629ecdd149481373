"""How a model writes calls and thoughts: as its chat template shows, or as the operator says. Pure: no IO."""

from dataclasses import dataclass

from router.text.calls.choose import DEFAULT_TOOLS, reasoning_parser_of, tool_parser_of
from router.text.calls.forms import FORMS, CallForm, form_of

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Names of parsers; "" = none. `form` is what guided calls are written in."""

    tools: str = DEFAULT_TOOLS
    reasoning: str = ""
    form: CallForm = FORMS[DEFAULT_TOOLS]

    @classmethod
    def of(cls, template: str | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> "Dialect":
        source = template or ""
        tools = tool_parser_of(source) if tool_parser == AUTO else tool_parser
        reasoning = reasoning_parser_of(source) if reasoning_parser == AUTO else reasoning_parser
        form = form_of(DEFAULT_TOOLS if tools == NONE else tools, source)
        return cls("" if tools == NONE else tools, "" if reasoning == NONE else reasoning, form)
