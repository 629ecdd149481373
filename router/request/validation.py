"""The one validator of both APIs: turns what a client stated into a request that cannot harm a worker. Pure: no IO.

What is accepted (everything else is an InvalidRequest that names the field):

    temperature          0 ... 2; below 1e-5 means greedy
    top_p                above 0 ... 1
    top_k                -1 or 0 = off, 1 or more; beyond the vocabulary = off
    min_p                0 ... 1
    presence_penalty     -2 ... 2
    frequency_penalty    -2 ... 2
    repetition_penalty   0.01 ... 100
    seed                 any signed 64-bit number; none = a random one
    n                    1 ... 8
    max_tokens           1 or more; prompt + max_tokens within the model's context
    min_tokens           0 ... max_tokens
    logprobs             0 ... 20
    logit_bias           300 entries, ids of the vocabulary, values -100 ... 100
    stop                 4 strings of 1 ... 64 characters
    stop_token_ids       64 ids of the vocabulary
    allowed_token_ids    1,024 ids of the vocabulary; with min_tokens one at least that does not end the answer
    priority             -100 (a tenant's own limit, with API keys) ... 100, lower runs earlier
    cache_salt           128 characters; with API keys only of tenants that may

NaN and infinities are outside of every range. max_tokens not stated: as the model's authors advise, else 16 for a
completion and what the context holds for a chat; only a default is clipped to the context, never a stated value.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from common.values.errors import ModelNotFound
from common.values.ids import RequestId
from common.values.request import SamplingParams
from router.core.generation import GenerationRequest
from router.request import limits
from router.request.checks import Checks
from router.request.served_model import ServedModel
from router.request.spec import ChatPrompt, RequestSpec, TextPrompt
from router.tenants.tenants import Tenant
from router.text.choice_text import TextOptions

DEFAULT_COMPLETION_TOKENS = 16
_SEED_MODULUS = 2**64


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """Ready to submit. `echo_text` is the prompt to repeat before the output; None = do not."""

    generation: GenerationRequest
    text: TextOptions
    tenant: Tenant
    echo_text: str | None = None


class Validator:
    """Stateless but for the generator of seeds."""

    def __init__(self, model: ServedModel, default_deadline_s: float, seeds: random.Random) -> None:
        self._model = model
        self._default_deadline_s = default_deadline_s
        self._seeds = seeds

    def check_model(self, name: str) -> None:
        """An empty name means the only model."""
        if name and name != self._model.name:
            raise ModelNotFound(f"model {name[:128]!r} is not served here", param="model")

    def validate(
        self, spec: RequestSpec, token_ids: Sequence[int], request_id: RequestId, tenant: Tenant
    ) -> ValidRequest:
        """`token_ids` are the tokens of `spec.prompt`."""
        check = Checks(spec, self._model)
        check.prompt(token_ids)
        max_tokens = check.max_tokens(len(token_ids), self._default_max_tokens(spec))
        generation = GenerationRequest(
            request_id=request_id,
            token_ids=tuple(token_ids),
            sampling=self._sampling(check, max_tokens),
            num_choices=check.integer("n", spec.num_choices, 1, limits.MAX_CHOICES),
            priority=check.integer("priority", spec.routing.priority, tenant.min_priority, 100),
            cache_salt=tenant.cache_salt(check.cache_salt()),
            tenant=tenant.name,
            deadline_s=check.deadline_s(self._default_deadline_s),
            prefill_worker_id=check.worker_id("prefill_worker_id", spec.routing.prefill_worker_id),
            decode_worker_id=check.worker_id("decode_worker_id", spec.routing.decode_worker_id),
            force_colocated=spec.routing.force_colocated,
        )
        echo_text = spec.prompt.text if isinstance(spec.prompt, TextPrompt) else ""
        return ValidRequest(generation, check.text_options(), tenant, echo_text if spec.echo else None)

    def _default_max_tokens(self, spec: RequestSpec) -> int:
        advised = self._model.generation_defaults.get("max_new_tokens")
        if advised:
            return int(advised)
        return self._model.max_model_len if isinstance(spec.prompt, ChatPrompt) else DEFAULT_COMPLETION_TOKENS

    def _sampling(self, check: Checks, max_tokens: int) -> SamplingParams:
        sampling, stop = check.spec.sampling, check.spec.stop
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        own_stop_ids = check.token_ids("stop_token_ids", stop.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
        eos_ids = () if stop.ignore_eos else self._model.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos_ids, *own_stop_ids)))
        min_tokens, allowed_ids = check.min_tokens(max_tokens), check.allowed_token_ids(stop_ids)
        return SamplingParams(
            seed=check.integer("seed", seed, -(2**63), 2**63 - 1) % _SEED_MODULUS,
            max_tokens=max_tokens,
            temperature=check.temperature(),
            top_k=check.top_k(),
            top_p=check.top_p(),
            min_p=check.float_in_range("min_p", sampling.min_p),
            presence_penalty=check.float_in_range("presence_penalty", sampling.presence_penalty),
            frequency_penalty=check.float_in_range("frequency_penalty", sampling.frequency_penalty),
            repetition_penalty=check.float_in_range("repetition_penalty", sampling.repetition_penalty),
            logit_bias=check.logit_bias(),
            allowed_token_ids=allowed_ids,
            num_logprobs=check.num_logprobs(),
            min_tokens=min_tokens,
            stop_token_ids=stop_ids,
        )
