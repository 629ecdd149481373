"""Options of `pdserve bench`. What it does is imported when it runs, so that help is quick."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dataset(StrEnum):
    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MOONCAKE = "mooncake"
    AZURE = "azure"


_URL = "http://127.0.0.1:8000"
_TRACES = (Dataset.MOONCAKE, Dataset.AZURE)


def bench(
    url: Annotated[
        str, typer.Option(envvar="PDSERVE_URL", help="Server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Default: the first that the server names.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Better in the variable: a command line is not private.")
    ] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions, in words.")] = False,
    dataset: Annotated[Dataset, typer.Option(help="What the prompts are like.")] = Dataset.RANDOM,
    trace: Annotated[Path | None, typer.Option(help="File of a mooncake or azure trace.")] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", "--num-prompts", min=1, help="At most so many.")] = 100,
    max_time: Annotated[float | None, typer.Option(min=0.001, help="Send for so many seconds at most.")] = None,
    request_rate: Annotated[float, typer.Option(min=1e-6, help="Poisson, per second; inf = all at once.")] = 1.0,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    prefix_len: Annotated[int, typer.Option(min=0, help="shared-prefix: how much of the prompt is shared.")] = 128,
    num_prefixes: Annotated[int, typer.Option(min=1, help="shared-prefix: how many different ones.")] = 4,
    time_scale: Annotated[float, typer.Option(min=1e-6, help="Traces: so many times as fast.")] = 1.0,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Traces: lengths times this.")] = 1.0,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Open requests; who waits for a place is late.")] = 1000,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a request has failed.")] = 600.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of exactly the length (vLLM, pdserve).")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = the likeliest token each time.")] = 0.0,
    goodput: Annotated[list[str] | None, typer.Option(help="ttft:MS, tpot:MS or e2el:MS; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    result: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write an SVG picture.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load a server of OpenAI's API, and measure it.

    Ours or another. Latencies count from the planned time.
    """
    from deploy.load.bench import BenchOptions, goal_of, run_bench
    from deploy.load.plan import Shape

    _check_trace(dataset, trace)
    shared = prefix_len if dataset is Dataset.SHARED_PREFIX else 0
    if shared > input_len:
        raise typer.BadParameter(f"--prefix-len {shared} is longer than --input-len {input_len}")
    try:
        goal = goal_of(goodput or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    options = BenchOptions(
        url=url,
        model=model,
        api_key=api_key,
        is_chat=chat,
        dataset=dataset.value,
        trace=trace,
        num_requests=num_requests,
        max_time_s=max_time,
        rate_per_s=request_rate,
        shape=Shape(input_len, output_len, shared, num_prefixes),
        time_scale=time_scale,
        length_scale=length_scale,
        max_concurrency=max_concurrency,
        timeout_s=timeout,
        ignore_eos=ignore_eos,
        temperature=temperature,
        seed=seed,
        goal=goal,
        result=result,
        plot=plot,
        as_json=json,
    )
    raise typer.Exit(run_bench(options))


def _check_trace(dataset: Dataset, trace: Path | None) -> None:
    if (dataset in _TRACES) != (trace is not None):
        raise typer.BadParameter(f"--dataset {dataset.value} {'needs' if dataset in _TRACES else 'takes no'} --trace")
