"""LangChain's own standard tests of a chat model, for `ChatOpenAI` on our server. Run by pytest in its environment."""

import os
from typing import Any

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found,unused-ignore]
from langchain_tests.integration_tests import ChatModelIntegrationTests  # type: ignore[import-not-found,unused-ignore]


class TestServer(ChatModelIntegrationTests):  # type: ignore[misc,unused-ignore]
    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["SUITE_MODEL"],
            "base_url": os.environ["SUITE_URL"],
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 64,
            "stream_usage": True,
        }

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True
