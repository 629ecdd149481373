"""`make suites`: other people's suites against a live server; prints what each says, writes build/suites.json.

    python -m tests.suites.run [--only NAME,NAME]

Serves the demo model in float32, one prefill and one decode worker, every prompt handed off, in chunks. A suite that
cannot be installed or does not start costs its own rows. The exit code is 0 where every suite was run.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

from common.checkpoint import open_checkpoint
from common.checkpoint.demo_model import fetch_demo_model
from tests.bench.peer_model import huggingface_directory
from tests.cluster.cluster import running_cluster
from tests.paths import ROOT
from tests.suites import lm_eval
from tests.suites.environments import COMPAT_CANARY, HOME, PINS, python_of
from tests.suites.row import Row, table

CHILDREN = Path(__file__).with_name("children")
MODEL = "demo"
CHUNK_TOKENS = 32  # so that the prompts of every suite are prefilled in several steps
LIMIT_S = 1800
Suite = Callable[[str, str, Path], Iterator[Row]]


def openai_rows(url: str, model: str, _: Path) -> Iterator[Row]:
    suite = f"the openai client, {PINS['openai'][0]}"
    done = _run([str(python_of("openai")), str(CHILDREN / "openai_rows.py"), url, model])
    for line in done.stdout.splitlines():
        row = json.loads(line)
        yield Row(suite, row["name"], "fails" if row["problem"] else "passes", row["problem"])


def langchain_rows(url: str, model: str, _: Path) -> Iterator[Row]:
    suite = f"LangChain's standard tests, {', '.join(PINS['langchain'][:2])}"
    report = HOME / "langchain.xml"
    report.unlink(missing_ok=True)
    command = [
        str(python_of("langchain")),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-c",
        os.devnull,
    ]
    command += [
        "--asyncio-mode=auto",
        "--rootdir",
        str(HOME),
        f"--junitxml={report}",
        str(CHILDREN / "langchain_rows.py"),
    ]
    done = _run(command, SUITE_URL=url, SUITE_MODEL=model)
    if not report.exists():
        raise RuntimeError((done.stderr or done.stdout)[-300:])
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        skipped = next((each for each in case if each.tag == "skipped"), None)
        if problem is not None:
            yield Row(suite, case.attrib["name"], "fails", problem.attrib.get("message", ""))
        elif skipped is not None:
            yield Row(suite, case.attrib["name"], "skipped", skipped.attrib.get("message", ""))
        else:
            yield Row(suite, case.attrib["name"], "passes")


def canary_rows(url: str, model: str, _: Path) -> Iterator[Row]:
    for profile in ("chat", "modern"):
        command = [
            "npx",
            "--yes",
            COMPAT_CANARY,
            "scan",
            "--base-url",
            url,
            "--model",
            model,
            "--profile",
            profile,
        ]
        done = _run(
            [
                *command,
                "--api-key",
                "none",
                "--format",
                "json",
                "--fail-on",
                "never",
                "--timeout",
                "120",
            ]
        )
        for found in json.loads(done.stdout)["results"]:
            outcome = {"pass": "passes", "fail": "fails"}.get(found["status"], found["status"])
            yield Row(
                f"{COMPAT_CANARY}, profile {profile}",
                found["name"],
                outcome,
                found.get("summary", ""),
            )


def load_rows(url: str, model: str, directory: Path) -> Iterator[Row]:
    suite = f"guidellm, {PINS['guidellm'][0]}"
    python_of("guidellm")
    report = HOME / "guidellm.json"
    report.unlink(missing_ok=True)
    command = [
        str(HOME / "guidellm" / "bin" / "guidellm"),
        "benchmark",
        "--target",
        url.removesuffix("/v1"),
    ]
    command += [
        "--model",
        model,
        "--processor",
        str(directory.absolute()),
        "--rate-type",
        "concurrent",
        "--rate",
        "4",
    ]
    command += [
        "--data",
        "prompt_tokens=128,output_tokens=32",
        "--max-requests",
        "24",
        "--output-path",
        str(report),
    ]
    done = _run(command, HF_HUB_OFFLINE="1", OPENAI_API_KEY="none")
    if not report.exists():
        raise RuntimeError((done.stderr or done.stdout)[-300:])
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    bad = totals["errored"] + totals["incomplete"]
    note = f"{totals['successful']} succeeded, {bad} did not"
    yield Row(
        suite,
        "24 requests, 4 at a time",
        "fails" if bad or not totals["successful"] else "passes",
        note,
    )


SUITES: dict[str, Suite] = {
    "openai": openai_rows,
    "lm_eval": lm_eval.rows,
    "canary": canary_rows,
    "langchain": langchain_rows,
    "guidellm": load_rows,
}


def spared(name: str, suite: Suite, url: str, directory: Path) -> Iterator[Row]:
    """The rows of a suite; one that says why there are none, or no more."""
    try:
        yield from suite(url, MODEL, directory)
    except (
        OSError,
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        subprocess.SubprocessError,
    ) as error:
        said = getattr(error, "stderr", None) or error
        text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        yield Row(
            name,
            "the suite itself",
            "not run",
            f"{type(error).__name__}: {text[-250:]}",
        )


def _run(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


def model_directory() -> Path:
    """The demo model as transformers reads it, with its chat template."""
    checkpoint, directory = open_checkpoint(fetch_demo_model(print)), HOME / "model"
    directory.mkdir(parents=True, exist_ok=True)
    for path in huggingface_directory(checkpoint).absolute().iterdir():
        (directory / path.name).unlink(missing_ok=True)
        (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(checkpoint.chat_template or "")
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"some of {', '.join(SUITES)}")
    names = [name for name in parser.parse_args().only.split(",") if name] or list(SUITES)
    HOME.mkdir(parents=True, exist_ok=True)
    directory = model_directory()
    rows: list[Row] = []
    config = {"model": {"served_name": MODEL}, "prefill_worker": {"max_num_batched_tokens": CHUNK_TOKENS}}
    options = ("--dtype", "float32", "--local-prefill-max-tokens", "0")
    with running_cluster(directory, *options, config=config) as cluster:
        for name in names:
            found = list(spared(name, SUITES[name], f"{cluster.url}/v1", directory))
            print(table(found), flush=True)
            rows += found
    (ROOT / "build" / "suites.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return int(any(row.outcome == "not run" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
