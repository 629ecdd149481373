"""The checks of single fields behind `router.request.validation`. Pure: no IO."""

from collections.abc import Collection, Sequence

from common.values.errors import ContextLengthExceeded, InvalidRequest
from router.request import limits
from router.request.served_model import ServedModel
from router.request.spec import RequestSpec
from router.text.choice_text import TextOptions

_GREEDY_BELOW = 1e-5
_FLOAT_RANGES = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
_DEFAULT_FLOATS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


class Checks:
    """Of one request. Each method returns the value to use, or raises InvalidRequest with the API's field name."""

    def __init__(self, spec: RequestSpec, model: ServedModel) -> None:
        self.spec = spec
        self._model = model

    def invalid(self, field: str, problem: str) -> InvalidRequest:
        """The error to raise: `problem` continues the sentence that the field's name begins."""
        name = self._name(field)
        return InvalidRequest(f"{name} {problem}", param=name)

    def prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise self.invalid("prompt", "is empty")
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            raise self.invalid("prompt", f"holds token ids outside 0 ... {self._model.vocab_size - 1}")
        if len(token_ids) >= self._model.max_model_len:
            raise self._too_long(len(token_ids), 1)

    def max_tokens(self, num_prompt_tokens: int, default: int) -> int:
        """A stated value must fit the context; the default is clipped to it."""
        room = self._model.max_model_len - num_prompt_tokens
        stated = self.spec.stop.max_tokens
        if stated is None:
            return min(default, room)
        if stated < 1:
            raise self.invalid("max_tokens", f"must be at least 1, got {stated}")
        if stated > room:
            raise self._too_long(num_prompt_tokens, stated)
        return stated

    def min_tokens(self, max_tokens: int) -> int:
        return self.integer("min_tokens", self.spec.stop.min_tokens or 0, 0, max_tokens)

    def temperature(self) -> float:
        value = self.float_in_range("temperature", self.spec.sampling.temperature)
        return 0.0 if value < _GREEDY_BELOW else value

    def top_p(self) -> float:
        value = self._stated_or_default("top_p", self.spec.sampling.top_p)
        if not 0.0 < value <= 1.0:
            raise self.invalid("top_p", f"must be above 0 and at most 1, got {value}")
        return value

    def top_k(self) -> int:
        value = self.spec.sampling.top_k
        if value is None:
            value = int(self._model.generation_defaults.get("top_k", 0))
        if value < -1:
            raise self.invalid("top_k", f"must be -1 or more, got {value}")
        return 0 if value < 0 or value >= self._model.vocab_size else value

    def float_in_range(self, field: str, stated: float | None) -> float:
        low, high = _FLOAT_RANGES[field]
        value = self._stated_or_default(field, stated)
        if not low <= value <= high:  # NaN is not in any range
            raise self.invalid(field, f"must be between {low:g} and {high:g}, got {value}")
        return value

    def integer(self, field: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise self.invalid(field, f"must be between {low} and {high}, got {_shortened(value)}")
        return value

    def token_ids(self, field: str, token_ids: Sequence[int], max_num: int) -> tuple[int, ...]:
        if len(token_ids) > max_num:
            raise self.invalid(field, f"holds {len(token_ids)} ids, at most {max_num} are allowed")
        for token_id in token_ids:
            self._in_vocabulary(field, token_id)
        return tuple(token_ids)

    def allowed_token_ids(self, stop_token_ids: Collection[int]) -> tuple[int, ...]:
        allowed = self.token_ids(
            "allowed_token_ids", self.spec.sampling.allowed_token_ids, limits.MAX_ALLOWED_TOKEN_IDS
        )
        if allowed and self.spec.stop.min_tokens and set(allowed) <= set(stop_token_ids):
            raise self.invalid("allowed_token_ids", "holds only tokens that end an answer, which min_tokens forbids")
        return allowed

    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        bias = self.spec.sampling.logit_bias
        if len(bias) > limits.MAX_LOGIT_BIAS:
            raise self.invalid("logit_bias", f"holds {len(bias)} entries, at most {limits.MAX_LOGIT_BIAS} are allowed")
        for token_id, value in bias.items():
            self._in_vocabulary("logit_bias", token_id)
            if not -100.0 <= value <= 100.0:
                raise self.invalid("logit_bias", f"must be between -100 and 100, got {value}")
        return tuple(sorted(bias.items()))

    def num_logprobs(self) -> int | None:
        value = self.spec.sampling.num_logprobs
        return None if value is None else self.integer("logprobs", value, 0, limits.MAX_LOGPROBS)

    def cache_salt(self) -> str:
        salt = self.spec.routing.cache_salt
        if len(salt) > limits.MAX_CACHE_SALT_LENGTH:
            raise self.invalid("cache_salt", f"is longer than {limits.MAX_CACHE_SALT_LENGTH} characters")
        return salt

    def worker_id(self, field: str, worker_id: str) -> str:
        if len(worker_id) > limits.MAX_REQUEST_ID_LENGTH:
            raise self.invalid(field, f"is longer than {limits.MAX_REQUEST_ID_LENGTH} characters")
        return worker_id

    def deadline_s(self, default: float) -> float:
        """A client may ask for less than the default and for more."""
        value = self.spec.routing.deadline_s
        if value is None:
            return default
        if not limits.MIN_DEADLINE_S <= value <= limits.MAX_DEADLINE_S:
            raise self.invalid("deadline", f"must be between {limits.MIN_DEADLINE_S} and {limits.MAX_DEADLINE_S:g} s")
        return value

    def text_options(self) -> TextOptions:
        stop = self.spec.stop
        if len(stop.stop) > limits.MAX_STOP_STRINGS:
            raise self.invalid("stop", f"holds {len(stop.stop)} strings, at most {limits.MAX_STOP_STRINGS} are allowed")
        if not all(0 < len(text) <= limits.MAX_STOP_LENGTH for text in stop.stop):
            raise self.invalid("stop", f"must hold strings of 1 to {limits.MAX_STOP_LENGTH} characters")
        return TextOptions(
            stops=tuple(dict.fromkeys(stop.stop)),
            include_stop=stop.include_stop,
            skip_special_tokens=self.spec.skip_special_tokens,
            return_text=self.spec.return_text,
            min_tokens=stop.min_tokens or 0,
            stop_token_ids=frozenset(stop.stop_token_ids),
        )

    def _stated_or_default(self, field: str, stated: float | None) -> float:
        if stated is not None:
            return stated
        return float(self._model.generation_defaults.get(field, _DEFAULT_FLOATS[field]))

    def _in_vocabulary(self, field: str, token_id: int) -> None:
        if not 0 <= token_id < self._model.vocab_size:
            problem = f"holds token id {_shortened(token_id)}, outside 0 ... {self._model.vocab_size - 1}"
            raise self.invalid(field, problem)

    def _too_long(self, num_prompt_tokens: int, max_tokens: int) -> ContextLengthExceeded:
        field = "prompt" if num_prompt_tokens >= self._model.max_model_len else "max_tokens"
        return ContextLengthExceeded(
            f"the model's context is {self._model.max_model_len} tokens; "
            f"the prompt has {num_prompt_tokens} and max_tokens asks for {_shortened(max_tokens)} more",
            param=self._name(field),
        )

    def _name(self, field: str) -> str:
        return self.spec.api_names.get(field, field)


def _shortened(value: int) -> str:
    """A number for a message: clients may send thousands of digits."""
    return str(value) if -(2**64) < value < 2**64 else "a number beyond 64 bits"
