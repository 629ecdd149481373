"""What to make of a request's answer, and what to hold it to, by the request and its model's dialect. Pure: no IO."""

from dataclasses import replace

from common.values.errors import Unsupported
from router.request.constraint import Guide
from router.request.dialect import Dialect
from router.request.spec import ChatPrompt, RequestSpec
from router.text.calls.choose import thinking_of
from router.text.calls.parser import HARMONY, THINK, Format


def format_of(spec: RequestSpec, dialect: Dialect, prompt_end: str) -> Format | None:
    """None: all of an answer is content. Raises Unsupported for tools where no form of calls is known."""
    if not isinstance(spec.prompt, ChatPrompt):
        return None
    use = spec.tools
    if use is not None and not dialect.tools:
        raise Unsupported("tools: this server is set up without a tool parser", param="tools")
    has_calls = use is not None and use.mode != "none"
    form = Format(
        tools=dialect.tools if has_calls else "",
        reasoning=dialect.reasoning,
        thinking=thinking_of(prompt_end),
        names=frozenset() if use is None else frozenset(tool.name for tool in use.tools),
        is_whole=spec.is_whole,
        is_single=use is not None and (use.is_single or dialect.is_single),
    )
    is_plain_json = spec.constraint is not None and not has_calls and dialect.reasoning == HARMONY
    return form if (form.tools or form.reasoning) and not is_plain_json else None


def guide_of(spec: RequestSpec, dialect: Dialect, form: Format | None) -> Guide | None:
    """What the answer is held to; None = nothing. `form` is what will be looked for in it.

    A call that the model must make, that is strict or of some of the tools only follows its schema. Where the client
    has constrained the answer too, it is either that or calls.
    """
    has_calls = form is not None and bool(form.tools)
    thinking = form.thinking if form is not None and form.reasoning == THINK else None
    calls = replace(spec.tools, is_single=form.is_single) if has_calls and spec.tools and form else None
    if calls is None:
        return None if spec.constraint is None else Guide(spec.constraint, thinking=thinking)
    if calls.mode == "required":
        return Guide(None, calls, dialect.form, thinking)
    if spec.constraint is not None:
        if dialect.tools == HARMONY:
            param = spec.constraint.param
            raise Unsupported(f"{param} together with tools is not supported for this model yet", param=param)
        return Guide(spec.constraint, calls, dialect.form, thinking)
    is_guided = bool(calls.names) or any(tool.is_strict for tool in calls.tools)
    return Guide(None, calls, dialect.form, thinking) if is_guided else None
