"""What gRPC and HTTP share: from a client's statement to a valid request, and to who answers it. No wire format here.

Owns the tokenizer's use, the validator and the requests in flight; the service behind it knows token ids only.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import assert_never

from common.telemetry.logs import get_logger
from common.values.errors import InvalidApiKey, InvalidRequest, PdserveError
from common.values.ids import RequestId
from router.front.in_flight import InFlight
from router.front.output import Answers
from router.front.service_protocol import GenerationService, Readiness
from router.observe.request_metrics import NullMetrics, RouterMetrics
from router.request import limits
from router.request.constraint import Grammars
from router.request.expected import format_of, guide_of
from router.request.served_model import ServedModel
from router.request.spec import ChatPrompt, Prompt, RequestSpec, TextPrompt, TokenPrompt
from router.request.validation import Validator, ValidRequest
from router.tenants.tenants import Tenant
from router.text.prompt_text import prompt_offsets
from router.text.token_text import TokenTexts
from router.text.tokenizer import PromptTokenizer, strings_in

_NO_METRICS = NullMetrics()
# Of a prompt: enough for a marker that is several tokens, and white space.
_NUM_END_TOKENS = 16


class Frontend:
    """Both APIs' way to the service."""

    def __init__(
        self,
        service: GenerationService,
        tokenizer: PromptTokenizer,
        model: ServedModel,
        validator: Validator,
        metrics: RouterMetrics = _NO_METRICS,
    ) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.model = model
        self.validator = validator
        self.token_texts = TokenTexts(tokenizer.tokenizer)
        self.in_flight = InFlight(service)
        self.answers = Answers(service, self.in_flight, self.token_texts)
        self._grammars = Grammars(tokenizer.tokenizer, model.vocab_size, model.eos_token_ids)
        self._metrics = metrics

    def readiness(self) -> Readiness:
        """Not ready while shutting down, else what the service says."""
        if self.in_flight.is_closed:
            return Readiness(is_ready=False, reasons=("the router is shutting down",))
        return self.service.readiness()

    def note_refusal(self, error: PdserveError) -> None:
        """Count and log what never reached the service; the service accounts for the rest."""
        if isinstance(error, InvalidRequest | InvalidApiKey):
            self._metrics.inc("pdserve_requests", status="refused", error_type=error.code)
            get_logger().info("request_refused", code=error.code)

    async def admit(
        self, spec: RequestSpec, request_id: RequestId, tenant: Tenant, trace_parent: str = ""
    ) -> ValidRequest:
        """Tokenize and validate. Raises InvalidRequest, and RateLimited before any of that."""
        tenant.check_places()
        self.validator.check_model(spec.stated.model or "")
        token_ids = await self.tokenize(spec.prompt)
        form = format_of(spec, self.model.dialect, self._end_of(token_ids))
        grammar = await self._grammars.grammar_of(guide_of(spec, self.model.dialect, form))
        request = self.validator.validate(spec, token_ids, request_id, tenant, grammar)
        if form is not None:
            text = replace(request.text, shown_ids=self.token_texts.ids_of(form.tokens))
            request = replace(request, form=form, text=text)
        if trace_parent:
            traced = replace(request.generation, trace_parent=trace_parent[: limits.MAX_TRACE_PARENT_LENGTH])
            request = replace(request, generation=traced)
        if spec.echo and not isinstance(spec.prompt, TextPrompt):
            return replace(request, echo_text=self.tokenizer.decode(token_ids))
        return request

    def _end_of(self, token_ids: Sequence[int]) -> str:
        """Of a prompt, where what it ends with says whether the model has begun to think."""
        return self.tokenizer.decode(token_ids[-_NUM_END_TOKENS:]) if self.model.dialect.reasoning else ""

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt; long texts off the event loop."""
        if _text_length(prompt) > limits.MAX_INLINE_TOKENIZE_LENGTH:
            return await asyncio.to_thread(self._tokenize, prompt)
        return self._tokenize(prompt)

    async def detokenize(self, token_ids: Sequence[int], param: str) -> str:
        """Text of token ids, special tokens included; of many off the event loop. Raises InvalidRequest."""
        if len(token_ids) > limits.MAX_INLINE_TOKENIZE_LENGTH:
            return await asyncio.to_thread(self._detokenize, token_ids, param)
        return self._detokenize(token_ids, param)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """What to show for each token; of many off the event loop."""
        if len(token_ids) > limits.MAX_INLINE_TOKENIZE_LENGTH:
            return await asyncio.to_thread(list, map(self.token_texts.text, token_ids))
        return list(map(self.token_texts.text, token_ids))

    async def prompt_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """See `router.text.prompt_text`; of many off the event loop."""
        if len(token_ids) > limits.MAX_INLINE_TOKENIZE_LENGTH // 16:  # ten times as slow as to encode them
            return await asyncio.to_thread(prompt_offsets, token_ids, text, self.token_texts)
        return prompt_offsets(token_ids, text, self.token_texts)

    def _detokenize(self, token_ids: Sequence[int], param: str) -> str:
        if any(not 0 <= token_id < self.model.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"{param} holds ids outside 0 ... {self.model.vocab_size - 1}", param=param)
        return self.tokenizer.decode(token_ids)

    def _tokenize(self, prompt: Prompt) -> Sequence[int]:
        match prompt:
            case TokenPrompt():
                return prompt.token_ids
            case TextPrompt(text=""):
                return ()
            case TextPrompt():
                return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
            case ChatPrompt():
                return self.tokenizer.encode_chat(
                    prompt.messages,
                    add_generation_prompt=prompt.add_generation_prompt,
                    kwargs=prompt.template_kwargs,
                    tools=prompt.tools,
                    reasoning_effort=prompt.reasoning_effort,
                )
            case _:
                assert_never(prompt)


def _text_length(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case ChatPrompt():
            texts = chain.from_iterable(message.values() for message in prompt.messages)
            return sum(map(len, strings_in([*texts, *prompt.tools, prompt.template_kwargs])))
        case TokenPrompt():
            return 0
