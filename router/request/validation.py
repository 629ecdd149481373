"""The one validator of both APIs: turns what a client stated into a request that cannot harm a worker. Pure: no IO.

What is accepted (everything else is an InvalidRequest that names the field): numbers within the ranges of
`router.request.spec`, and

    temperature          below 1e-5 means greedy
    top_k                -1 or 0 = off, as is anything beyond the vocabulary
    seed                 none = a random one
    max_tokens           1 or more; prompt + max_tokens within the model's context. 0 with echo or prompt_logprobs, for
                         nothing but those
    min_tokens           0 ... max_tokens
    best_of              n ... 8, not with stream
    use_beam_search      not with stream, constraints or what shapes draws; best_of or else n are the beams
    length_penalty       -10 ... 10; it and early_stopping only with use_beam_search
    logprobs             0 ... 20; prompt_logprobs as well
    logit_bias           300 entries, ids of the vocabulary
    stop                 4 strings of 1 ... 64 characters
    stop_token_ids       64 ids of the vocabulary
    allowed_token_ids    1,024 ids of the vocabulary; with min_tokens one at least that does not end the answer
    bad_words            64 strings of 1 ... 64 characters; they leave a token to draw, whatever came before
    priority             lower runs earlier; with API keys not below the tenant's own limit
    cache_salt           128 characters; with API keys only of tenants that may

NaN and infinities are outside of every range. max_tokens not stated: as the model's authors advise, else 16 for a
completion and `router.default_max_tokens` for a chat; only a default is clipped to the context, never a stated value.
"""

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from common.values.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from common.values.ids import RequestId
from common.values.request import NO_ADAPTER, SamplingParams
from router.core.generation import GenerationRequest
from router.request import beams, limits
from router.request.adapters import ServedAdapter, ServedAdapters
from router.request.served_model import ServedModel
from router.request.spec import RANGES, ChatPrompt, Range, RequestSpec, TextPrompt
from router.tenants.tenants import Tenant
from router.text.calls.parser import Format
from router.text.choice_text import TextOptions

DEFAULT_COMPLETION_TOKENS = 16
Encode = Callable[[str], Sequence[int]]
_GREEDY_BELOW = 1e-5
_SEED_MODULUS = 2**64
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
# Numbers that need nothing but their range.
_PLAIN = [name for name in RANGES if _DEFAULTS.get(name, dataclasses.MISSING) is not dataclasses.MISSING]
_PLAIN.remove("min_tokens")
_PLAIN.remove("length_penalty")


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """Ready to submit. `echo_text` is the prompt to repeat before the output; None = do not."""

    generation: GenerationRequest
    text: TextOptions
    tenant: Tenant
    echo_text: str | None = None
    form: Format | None = None  # how to tell an answer's parts apart; None = all of it is text


class Validator:
    """Stateless but for the generator of seeds."""

    def __init__(
        self,
        model: ServedModel,
        default_deadline_s: float,
        seeds: random.Random,
        encode: Encode,
        default_max_tokens: int = 0,
        adapters: ServedAdapters | None = None,
    ) -> None:
        """`encode` gives the tokens of a text by itself; `default_max_tokens` of a chat, 0 = what the context holds."""
        self._model = model
        self._default_max_tokens = default_max_tokens
        self._encode = encode
        self._default_deadline_s = default_deadline_s
        self._seeds = seeds
        self.adapters = adapters or ServedAdapters()

    def check_model(self, name: str) -> ServedAdapter | None:
        """The adapter of that name. An empty name means the model itself."""
        if not name or name == self._model.name:
            return None
        served = self.adapters.get(name)
        if served is None:
            names = [self._model.name, *(each.name for each in self.adapters.all[: limits.MAX_NAMES_SHOWN])]
            verb = "is" if len(names) == 1 else "are"
            text = f"model {name[:128]!r} is not served here; {', '.join(map(repr, names))} {verb}"
            raise ModelNotFound(text, param="model")
        return served

    def validate(
        self, spec: RequestSpec, token_ids: Sequence[int], request_id: RequestId, tenant: Tenant, grammar: str = ""
    ) -> ValidRequest:
        """`token_ids` are the tokens of `spec.prompt`, `grammar` is what `spec.constraint` became."""
        check = _Checks(spec, self._model, self._encode, self._default_max_tokens)
        check.prompt(token_ids)
        sampling = check.sampling(len(token_ids), self._seeds, grammar)
        num_choices, num_best = check.choices()
        stated, pins = spec.stated, spec.pins
        served = self.check_model(stated.model or "")
        generation = GenerationRequest(
            request_id=request_id,
            token_ids=tuple(token_ids),
            sampling=sampling,
            num_choices=num_choices,
            num_best=num_best,
            priority=check.within("priority", stated.priority or 0, low=tenant.min_priority),
            cache_salt=tenant.cache_salt(check.length("cache_salt", stated.cache_salt, limits.MAX_CACHE_SALT_LENGTH)),
            tenant=tenant.name,
            deadline_s=check.deadline_s(self._default_deadline_s),
            prefill_worker_id=check.length("prefill_worker_id", pins.prefill_worker_id, limits.MAX_REQUEST_ID_LENGTH),
            decode_worker_id=check.length("decode_worker_id", pins.decode_worker_id, limits.MAX_REQUEST_ID_LENGTH),
            force_colocated=pins.force_colocated,
            num_prompt_logprobs=check.num_prompt_logprobs(),
            has_output=spec.max_tokens != 0,
            adapter=NO_ADAPTER if served is None else served.adapter,
            adapter_name="" if served is None else served.name,
        )
        echo_text = spec.prompt.text if isinstance(spec.prompt, TextPrompt) else ""
        return ValidRequest(generation, check.text_options(), tenant, echo_text if spec.echo else None)


class _Checks:
    """Of one request. Each method returns the value to use, or raises InvalidRequest with the API's field name."""

    def __init__(self, spec: RequestSpec, model: ServedModel, encode: Encode, default_max_tokens: int) -> None:
        self._chat_tokens = default_max_tokens or model.max_model_len
        self._encode = encode
        self._spec = spec
        self._stated = spec.stated
        self._model = model

    def prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise self._invalid("prompt", "is empty")
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            raise self._invalid("prompt", f"holds token ids outside 0 ... {self._model.vocab_size - 1}")
        if len(token_ids) >= self._model.max_model_len:
            raise self._too_long(len(token_ids), 1)

    def sampling(self, num_prompt_tokens: int, seeds: random.Random, grammar: str) -> SamplingParams:
        """What the workers hear of how to sample and when to stop."""
        stated, seed = self._stated, self._stated.seed
        if grammar and stated.ignore_eos:
            raise self._invalid("ignore_eos", "does not go with a constrained output, which knows where it ends")
        eos_ids = () if stated.ignore_eos else self._model.eos_token_ids
        stop_ids = (*eos_ids, *self._token_ids("stop_token_ids", limits.MAX_STOP_TOKEN_IDS))
        if (misfit := beams.misfit(self._spec, grammar)) is not None:
            raise self._invalid(*misfit)
        max_tokens, allowed_ids = self._max_tokens(num_prompt_tokens), self._allowed_token_ids(stop_ids)
        params = SamplingParams(
            seed=self.within("seed", seeds.getrandbits(63) if seed is None else seed) % _SEED_MODULUS,
            max_tokens=max_tokens,
            min_tokens=self.within("min_tokens", stated.min_tokens or 0, high=max_tokens),
            logit_bias=self._logit_bias(),
            allowed_token_ids=allowed_ids,
            bad_words=self._bad_words(allowed_ids, stop_ids),
            num_logprobs=self._num_logprobs_drawn(),
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            grammar=grammar,
            **(self._numbers() if not stated.use_beam_search else self._beams()),
        )
        if params.num_candidates > self._model.vocab_size:
            raise self._invalid("use_beam_search", "needs more candidates of each beam than the vocabulary has")
        return params

    def choices(self) -> tuple[int, int | None]:
        """How many are generated, and how many of them are returned: None = all, as they come."""
        num_returned = self.within("n", 1 if self._stated.n is None else self._stated.n)
        best_of = self._stated.best_of
        if best_of is None or best_of == num_returned == 1 or self._stated.use_beam_search:
            return num_returned, None
        if not self._spec.is_whole:
            raise self._invalid("best_of", "is not available with stream: which choices are best shows at the end")
        return self.within("best_of", best_of, low=num_returned), num_returned

    def within(self, field: str, value: Any, low: float | None = None, high: float | None = None) -> Any:
        """`low` and `high`: this request's own limits, where the field's are wider."""
        allowed = RANGES[field]
        if low is not None or high is not None:
            low, high = (own if own is not None else wide for own, wide in zip((low, high), allowed, strict=False))
            allowed = Range(low, high, allowed.has_low)
        if not allowed.holds(value):
            raise self._invalid(field, f"must be {allowed}, got {_shortened(value)}")
        return value

    def length(self, field: str, text: str | None, max_length: int) -> str:
        if text is not None and len(text) > max_length:
            raise self._invalid(field, f"is longer than {max_length} characters")
        return text or ""

    def deadline_s(self, default: float) -> float:
        """A client may ask for less than the default and for more."""
        value = self._spec.deadline_s
        if value is None:
            return default
        if not limits.MIN_DEADLINE_S <= value <= limits.MAX_DEADLINE_S:
            raise self._invalid("deadline", f"must be between {limits.MIN_DEADLINE_S} and {limits.MAX_DEADLINE_S:g} s")
        return value

    def num_prompt_logprobs(self) -> int | None:
        """As many as the field or the repeated prompt needs."""
        stated = self._stated.prompt_logprobs
        wanted = [] if stated is None else [self.within("prompt_logprobs", stated)]
        if self._spec.scores_echo:
            wanted.append(self._num_logprobs() or 0)
        return max(wanted, default=None)

    def text_options(self) -> TextOptions:
        stated = self._stated
        stops = [stated.stop] if isinstance(stated.stop, str) else stated.stop or []
        if len(stops) > limits.MAX_STOP_STRINGS:
            raise self._invalid("stop", f"holds {len(stops)} strings, at most {limits.MAX_STOP_STRINGS} are allowed")
        if not all(0 < len(text) <= limits.MAX_STOP_LENGTH for text in stops):
            raise self._invalid("stop", f"must hold strings of 1 to {limits.MAX_STOP_LENGTH} characters")
        return TextOptions(
            stops=tuple(dict.fromkeys(stops)),
            include_stop=bool(stated.include_stop_str_in_output),
            skip_special_tokens=stated.skip_special_tokens is not False,
            return_text=self._spec.return_text,
            min_tokens=stated.min_tokens or 0,
            stop_token_ids=frozenset(stated.stop_token_ids or ()),
        )

    def _numbers(self) -> dict[str, Any]:
        """Those that need nothing but their range: as stated, else as the model's authors advise."""
        advised = self._model.generation_defaults
        values: dict[str, Any] = {}
        for name in _PLAIN:
            value = getattr(self._stated, name)
            default = _DEFAULTS[name]
            values[name] = self.within(name, type(default)(advised.get(name, default)) if value is None else value)
        values["temperature"] = 0.0 if values["temperature"] < _GREEDY_BELOW else values["temperature"]
        values["top_k"] = values["top_k"] if 0 < values["top_k"] < self._model.vocab_size else 0
        return values

    def _max_tokens(self, num_prompt_tokens: int) -> int:
        """A stated value must fit the context; the default is clipped to it."""
        room, stated = self._model.max_model_len - num_prompt_tokens, self._spec.max_tokens
        if stated is None:
            return min(self._default_max_tokens(), room)
        if stated == 0 and (self._spec.echo or self._stated.prompt_logprobs is not None):
            return 1
        if stated < 1:
            raise self._invalid("max_tokens", f"must be at least 1, got {_shortened(stated)}")
        if stated > room:
            raise self._too_long(num_prompt_tokens, stated)
        return stated

    def _default_max_tokens(self) -> int:
        advised = self._model.generation_defaults.get("max_new_tokens")
        if advised:
            return int(advised)
        return self._chat_tokens if isinstance(self._spec.prompt, ChatPrompt) else DEFAULT_COMPLETION_TOKENS

    def _token_ids(self, field: str, max_num: int) -> tuple[int, ...]:
        token_ids = getattr(self._stated, field) or ()
        if len(token_ids) > max_num:
            raise self._invalid(field, f"holds {len(token_ids)} ids, at most {max_num} are allowed")
        for token_id in token_ids:
            self._in_vocabulary(field, token_id)
        return tuple(token_ids)

    def _allowed_token_ids(self, stop_token_ids: Collection[int]) -> tuple[int, ...]:
        allowed = self._token_ids("allowed_token_ids", limits.MAX_ALLOWED_TOKEN_IDS)
        if allowed and self._stated.min_tokens and set(allowed) <= set(stop_token_ids):
            raise self._invalid("allowed_token_ids", "holds only tokens that end an answer, which min_tokens forbids")
        return allowed

    def _bad_words(self, allowed_ids: Collection[int], stop_token_ids: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """Each as it stands at the beginning of a text and, where that is one more token of its own, after a space."""
        texts = self._stated.bad_words or []
        if len(texts) > limits.MAX_BAD_WORDS:
            raise self._invalid("bad_words", f"holds {len(texts)} strings, at most {limits.MAX_BAD_WORDS} are allowed")
        if not all(0 < len(text) <= limits.MAX_BAD_WORD_LENGTH and text.strip() for text in texts):
            raise self._invalid("bad_words", f"must hold words of 1 to {limits.MAX_BAD_WORD_LENGTH} characters")
        words: dict[tuple[int, ...], None] = {}
        for text in texts:
            plain, spaced = (tuple(self._encode(space + text.lstrip())) for space in ("", " "))
            words[plain] = None
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                words[spaced] = None
        forbidden = {word[-1] for word in words} | set(stop_token_ids if self._stated.min_tokens else ())
        others = allowed_ids or range(min(self._model.vocab_size, len(forbidden) + 1))
        if words and not set(others) - forbidden:
            raise self._invalid("bad_words", "may forbid every token that is allowed")
        return tuple(words)

    def _logit_bias(self) -> tuple[tuple[int, float], ...]:
        bias = self._stated.logit_bias or {}
        if len(bias) > limits.MAX_LOGIT_BIAS:
            raise self._invalid("logit_bias", f"holds {len(bias)} entries, at most {limits.MAX_LOGIT_BIAS} are allowed")
        for token_id, value in bias.items():
            self._in_vocabulary("logit_bias", token_id)
            if not -100.0 <= value <= 100.0:
                raise self._invalid("logit_bias", f"must be between -100 and 100, got {value}")
        return tuple(sorted(bias.items()))

    def _num_logprobs(self) -> int | None:
        value = self._spec.num_logprobs
        if value is not None and not 0 <= value <= limits.MAX_LOGPROBS:
            raise self._invalid("logprobs", f"must be between 0 and {limits.MAX_LOGPROBS}, got {_shortened(value)}")
        return value

    def _beams(self) -> dict[str, Any]:
        """Of a beam search, as wide as there are choices to find the best among."""
        stated, num_returned = self._stated, self.choices()[0]
        if stated.length_penalty is not None:
            self.within("length_penalty", stated.length_penalty)
        num_beams = num_returned if stated.best_of is None else self.within("best_of", stated.best_of, low=num_returned)
        return beams.fields_of(stated, num_beams)

    def _num_logprobs_drawn(self) -> int | None:
        """Choices are ranked by the logprobs of their tokens, whether the client hears of those or not."""
        num_logprobs = self._num_logprobs()
        return 0 if num_logprobs is None and self.choices()[1] is not None else num_logprobs

    def _in_vocabulary(self, field: str, token_id: int) -> None:
        if not 0 <= token_id < self._model.vocab_size:
            problem = f"holds token id {_shortened(token_id)}, outside 0 ... {self._model.vocab_size - 1}"
            raise self._invalid(field, problem)

    def _too_long(self, num_prompt_tokens: int, max_tokens: int) -> ContextLengthExceeded:
        stated = self._name("max_tokens")
        return ContextLengthExceeded(
            f"the model's context is {self._model.max_model_len} tokens; "
            f"the prompt has {num_prompt_tokens} and {stated} asks for {_shortened(max_tokens)} more",
            param=self._name("prompt") if num_prompt_tokens >= self._model.max_model_len else stated,
        )

    def _invalid(self, field: str, problem: str) -> InvalidRequest:
        """The error to raise: `problem` continues the sentence that the field's name begins."""
        name = self._name(field)
        return InvalidRequest(f"{name} {problem}", param=name)

    def _name(self, field: str) -> str:
        return self._spec.api_names.get(field, field)


def _shortened(value: float) -> str:
    """A number for a message: clients may send thousands of digits."""
    return str(value) if not isinstance(value, int) or -(2**64) < value < 2**64 else "a number beyond 64 bits"
