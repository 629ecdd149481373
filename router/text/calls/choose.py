"""Which parsers a model needs, by the markers that its chat template writes. Pure: no IO."""

from router.text.calls.bodies import DEEPSEEK_BEGIN
from router.text.calls.harmony import CHANNEL
from router.text.calls.parser import HARMONY, THINK, THINK_END, Thinking

DEFAULT_TOOLS = "hermes"
# The first whose marker is found.
_TOOL_MARKERS = (
    (CHANNEL, HARMONY),
    (DEEPSEEK_BEGIN, "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
_REASONING_MARKERS = ((CHANNEL, HARMONY), (THINK_END, THINK), ("<think>", THINK))


def tool_parser_of(template: str) -> str:
    """A template that shows no form of calls gets the commonest, which the prompt then describes."""
    return next((name for marker, name in _TOOL_MARKERS if marker in template), DEFAULT_TOOLS)


def reasoning_parser_of(template: str) -> str:
    """ "" for a model that does not think."""
    return next((name for marker, name in _REASONING_MARKERS if marker in template), "")


def thinking_of(prompt_end: str) -> Thinking:
    """Where the answer to a prompt that ends so begins."""
    text = prompt_end.rstrip()
    if text.endswith("<think>"):
        return Thinking.OPEN
    return Thinking.CLOSED if text.endswith(THINK_END) else Thinking.UNKNOWN
