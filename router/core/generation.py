"""The boundary between the front ends (gRPC, HTTP) and the router's core: one request in, events out. Pure: no IO."""

from dataclasses import dataclass, field

from common.values.errors import PdserveError
from common.values.ids import RequestId
from common.values.request import NO_ADAPTER, Adapter, PromptLogprobs, SamplingParams, TokenEvent


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated, tokenized request. Stop strings are not here: text is the front end's business.

    `deadline_s` is the time left. `prefill_worker_id` and `decode_worker_id` pin a worker (debugging);
    `force_colocated` makes the decode worker prefill the whole prompt itself. `num_prompt_logprobs`: see `Work`. Of
    `num_choices` the client gets the `num_best` best; None = all, as they come. `has_output` False: the client wants
    its prompt alone; the one token that is drawn all the same is neither shown nor counted.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    num_best: int | None = None
    priority: int = 0
    cache_salt: bytes = b""
    deadline_s: float = 600.0
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    force_colocated: bool = False
    tenant: str = ""  # waiting work is shared out fairly between tenants; an opaque word
    trace_parent: str = ""  # W3C traceparent, as the client sent it
    num_prompt_logprobs: int | None = None
    adapter: Adapter = NO_ADAPTER
    adapter_name: str = ""  # as the client knows it
    has_output: bool = True

    @property
    def num_returned(self) -> int:
        """Choices that the client gets."""
        return self.num_choices if self.num_best is None else self.num_best


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """The waterfall: consecutive phases in seconds on the router's clock.

    route + prefill_queue + prefill + kv_exposed + decode_queue + decode == wall, always: time on the wire
    between our processes counts to the phase that waits for it (decode takes the rest).
    """

    route_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    kv_exposed_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    time_to_first_token_s: float = 0.0
    wall_s: float = 0.0
    kv_bytes: int = 0
    kv_chunks: int = 0
    num_retries: int = 0
    # (start, end, tokens) of each prefill step, seconds since the request arrived.
    prefill_chunks: tuple[tuple[float, float, int], ...] = ()
    # (time, first layer, layer after the last, tokens) of KV chunks that were in place, the last ones of very many.
    kv_ticks: tuple[tuple[float, int, int, int], ...] = ()
    kv_transport: str = ""  # what the KV came over
    kv_link_bytes_per_s: float = 0.0  # as its sender measured that link lately; 0: not yet


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is placed. Sent once, before the first tokens."""

    prefill_worker_id: str
    decode_worker_id: str
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of any choices; per choice the positions follow one another without gap or repeat."""

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices have ended (by a finish_reason in Tokens, or by `stop_choice`). Last event of a success.

    `num_cached_tokens`: prompt tokens that were not computed for this request.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    timings: RequestTimings = field(default_factory=RequestTimings)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without success. Last event."""

    error: PdserveError


# PromptLogprobs: of the next prompt tokens, from position 1 on without gap or repeat; the last before the first Tokens.
GenerationEvent = Accepted | PromptLogprobs | Tokens | Finished | Failed
