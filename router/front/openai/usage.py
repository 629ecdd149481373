"""What a request cost, in the forms of the OpenAI API and its dialects. Pure: no IO."""

from collections.abc import Sequence

from router.core.generation import RequestTimings
from router.front.openai.responses import PromptTokensDetails, RequestMetrics, Usage
from router.front.output import Summary


def usage_of(summaries: Sequence[Summary]) -> Usage:
    """Of all prompts of a request together; the prompt's tokens count once, however many choices it has."""
    return usage_of_counts(
        sum(summary.num_prompt_tokens for summary in summaries),
        sum(summary.num_completion_tokens for summary in summaries),
        sum(summary.num_cached_tokens for summary in summaries),
    )


def usage_of_counts(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Usage:
    num_tokens = num_prompt_tokens + num_completion_tokens
    return Usage(num_prompt_tokens, num_completion_tokens, num_tokens, PromptTokensDetails(num_cached_tokens))


def timings_of(summaries: Sequence[Summary]) -> RequestTimings:
    """Of the slowest of a request's prompts."""
    return max((summary.timings for summary in summaries), key=lambda timings: timings.wall_s)


def metrics_of(timings: RequestTimings, num_completion_tokens: int) -> RequestMetrics:
    after_first_s = max(0.0, timings.wall_s - timings.time_to_first_token_s)
    hidden_s = max(0.0, timings.kv_transfer_s - timings.kv_exposed_s)
    return RequestMetrics(
        time_to_first_token_ms=_ms(timings.time_to_first_token_s),
        wall_ms=_ms(timings.wall_s),
        route_ms=_ms(timings.route_s),
        queue_time_ms=_ms(timings.prefill_queue_s),
        prefill_ms=_ms(timings.prefill_s),
        kv_transfer_ms=_ms(timings.kv_transfer_s),
        kv_exposed_ms=_ms(timings.kv_exposed_s),
        kv_overlap_ratio=round(hidden_s / timings.kv_transfer_s, 4) if timings.kv_transfer_s > 0 else 1.0,
        decode_queue_ms=_ms(timings.decode_queue_s),
        decode_ms=_ms(timings.decode_s),
        mean_itl_ms=_ms(after_first_s / max(1, num_completion_tokens - 1)),
        tokens_per_second=round(num_completion_tokens / timings.wall_s, 3) if timings.wall_s > 0 else 0.0,
        kv_bytes=timings.kv_bytes,
        kv_chunks=timings.kv_chunks,
        retries=timings.num_retries,
    )


def server_timing(timings: RequestTimings) -> str:
    """The `Server-Timing` header, which browsers draw."""
    parts = {
        "route": timings.route_s,
        "queue": timings.prefill_queue_s,
        "prefill": timings.prefill_s,
        "kv": timings.kv_exposed_s,
        "decode_queue": timings.decode_queue_s,
        "decode": timings.decode_s,
    }
    return ", ".join(f"{name};dur={_ms(seconds):g}" for name, seconds in parts.items())


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
