"""The functions that a model may call, as a request states them. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: JSON schema of the arguments, an object; None = any. `param`: the API's name of it, for errors."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    param: str = "tools"

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates know tools: some fail without a description."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        described = {"name": self.name, "description": self.description or "", "parameters": dict(parameters)}
        return {"type": "function", "function": described}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`names`: the only ones that may be called; empty = all. `is_single`: one call at most."""

    tools: tuple[Tool, ...]
    mode: Mode = "auto"
    names: frozenset[str] = field(default_factory=frozenset)
    is_single: bool = False

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Those that the model is told of: all, lest a prefix that is cached be another, unless it may call none."""
        return () if self.mode == "none" else self.tools

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if not self.names or tool.name in self.names)
