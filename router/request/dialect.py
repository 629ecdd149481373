"""How a model writes calls and thoughts: as its chat template shows, or as the operator says. Pure: no IO."""

from dataclasses import dataclass

from router.text.calls.choose import DEFAULT_TOOLS, reasoning_parser_of, tool_parser_of
from router.text.calls.forms import FORMS, CallForm, form_of

AUTO, NONE = "auto", "none"
_REFUSES_SEVERAL = "only supports single tool-calls"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Names of parsers; "" = none. `form` is what guided calls are written in.

    `is_single`: the template refuses a conversation with several calls in one answer, as Llama 3's do.
    """

    tools: str = DEFAULT_TOOLS
    reasoning: str = ""
    form: CallForm = FORMS[DEFAULT_TOOLS]
    is_single: bool = False

    @classmethod
    def of(cls, template: str | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> "Dialect":
        source = template or ""
        tools = tool_parser_of(source) if tool_parser == AUTO else tool_parser
        reasoning = reasoning_parser_of(source) if reasoning_parser == AUTO else reasoning_parser
        form = form_of(DEFAULT_TOOLS if tools == NONE else tools, source)
        is_single = _REFUSES_SEVERAL in source
        return cls("" if tools == NONE else tools, "" if reasoning == NONE else reasoning, form, is_single)
