"""`lm-eval` with a local task over `/v1/completions`, beside transformers: the same numbers, cold and with prefix hits.

Its `local-completions` sends token ids with `echo` and `logprobs`, and adds up the logprobs of a continuation. What it
logged of each request is computed again by transformers, from the same weights in float32.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.suites.environments import HOME, python_of
from tests.suites.row import Row

SUITE = "lm-eval, local-completions with a local task"
DATA = Path(__file__).with_name("data") / "facts.jsonl"
LIMIT_S = 900
TOLERANCE = 1e-3  # of a token
_TASK = {
    "task": "facts",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(DATA)}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


def rows(url: str, model: str, directory: Path) -> Iterator[Row]:
    """`directory` is the model that the server serves; the first run finds nothing cached, the second its prefixes."""
    reference = Reference(directory)
    for name in ("cold", "with prefix hits"):
        samples = _run(url, model, directory, name.replace(" ", "-"))
        answered = [one for sample in samples for one in _answers(sample)]
        problems = list(filter(None, (reference.problem(*one) for one in answered)))
        note = problems[0] if problems else f"{len(answered)} continuations within {TOLERANCE:g} per token"
        yield Row(
            SUITE,
            f"the numbers of transformers, {name}",
            "fails" if problems else "passes",
            note,
        )


def _run(url: str, model: str, directory: Path, name: str) -> list[dict[str, Any]]:
    """What lm-eval logged of each question."""
    home = HOME / "lm_eval_run" / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "facts.yaml").write_text(json.dumps(_TASK))  # JSON is YAML
    arguments = f"model={model},base_url={url}/completions,tokenizer={directory.absolute()},num_concurrent=4"
    command = [
        str(python_of("lm_eval")),
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
    ]
    command += [
        "--tasks",
        "facts",
        "--include_path",
        str(home),
        "--output_path",
        str(home / "out"),
    ]
    command += ["--log_samples", "--batch_size", "4"]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(HOME / "hf"),
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(
        command,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"lm-eval ended with {done.returncode}: {done.stderr[-400:]}")
    (newest,) = sorted((home / "out").rglob("samples_facts_*.jsonl"))[-1:]
    return [json.loads(line) for line in newest.read_text().splitlines()]


def _answers(sample: dict[str, Any]) -> Iterator[tuple[str, str, float, bool]]:
    """(context, continuation, logprob, is greedy) of each choice."""
    for arguments, responses in zip(sample["arguments"].values(), sample["resps"], strict=True):
        logprob, is_greedy = responses[0]
        yield (
            arguments["arg_0"],
            arguments["arg_1"],
            float(logprob),
            str(is_greedy) == "True",
        )


class Reference:
    """transformers on the same directory."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # two that wait for each other stand still beside a busy server
        self._known: dict[tuple[str, str], tuple[float, int, bool]] = {}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)

    def problem(self, context: str, continuation: str, logprob: float, is_greedy: bool) -> str:
        """What differs, "" = nothing."""
        key = context, continuation
        if key not in self._known:
            self._known[key] = self._computed(*key)
        expected, num_tokens, is_best = self._known[key]
        if abs(expected - logprob) > TOLERANCE * num_tokens:
            return f"{continuation!r}: {logprob}, expected {expected}"
        return "" if is_best == is_greedy else f"{continuation!r}: greedy {is_greedy}, expected {is_best}"

    @torch.inference_mode()
    def _computed(self, context: str, continuation: str) -> tuple[float, int, bool]:
        """The continuation's logprob, its tokens, whether each is the most likely."""
        whole = self._tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        targets = torch.tensor(whole[len(self._tokenizer(context, add_special_tokens=False)["input_ids"]) :])
        output = self._model(torch.tensor([whole]), logits_to_keep=len(targets) + 1)
        logits = output.logits[0, :-1].float().log_softmax(-1)
        logprob = logits.gather(1, targets[:, None]).sum().item()
        return logprob, len(targets), bool((logits.argmax(-1) == targets).all())
