"""The guides: their Helm commands pass the chart's schema, their values files too, their links lead somewhere."""

import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy_artifacts.toolbox import CHART, ROOT

GUIDES = sorted((ROOT / "docs" / "deploy").glob("*.md"))


def code_lines(text: str) -> list[str]:
    """Lines of indented code blocks, continuations joined."""
    return [line[4:] for line in text.replace("\\\n", " ").splitlines() if line.startswith("    ")]


def chart_commands() -> Iterator[tuple[str, list[str]]]:
    """(guide, --set and --values arguments) of every command that installs or upgrades the chart."""
    for guide in GUIDES:
        for line in code_lines(guide.read_text()):
            words = shlex.split(line, comments=True) if line.startswith("helm ") else []
            if "deploy/helm/pdserve" in words:
                yield guide.name, words


CHART_COMMANDS = list(chart_commands())


@pytest.mark.parametrize(("guide", "words"), CHART_COMMANDS, ids=[" ".join(words) for _, words in CHART_COMMANDS])
def test_the_chart_takes_what_the_guide_sets(helm: Callable[..., Any], guide: str, words: list[str]) -> None:
    settings = [word for flag, word in pairwise(words) if flag == "--set"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    done = helm("template", words[2], str(CHART), *arguments)
    assert done.returncode == 0, f"{guide}: {done.stderr}"


def test_every_guide_with_an_installation_is_among_those_checked() -> None:
    assert {guide for guide, _ in CHART_COMMANDS} == {guide.name for guide in GUIDES}


def test_the_values_file_of_the_model_guide_is_accepted(helm: Callable[..., Any], tmp_path: Path) -> None:
    lines = code_lines((ROOT / "docs" / "deploy" / "change-the-model.md").read_text())
    start = lines.index("# llama.yaml")
    body = "\n".join(line for line in lines[start + 1 :] if line[:1] in (" ", "") or re.match(r"[a-z]+:", line))
    assert {"model", "image", "config", "prefill", "decode"} == set(yaml.safe_load(body.split("kubectl")[0]))
    (tmp_path / "llama.yaml").write_text(body)
    done = helm("template", "llama", str(CHART), "--values", str(tmp_path / "llama.yaml"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_links_lead_to_files(guide: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", guide.read_text())
    missing = [target for target in targets if "://" not in target and not (guide.parent / target).exists()]
    assert missing == []


def test_names_in_the_quickstart_are_those_that_the_chart_makes(helm: Callable[..., Any]) -> None:
    """Deployment, Service and Secret of `helm install pdserve`."""
    text = (ROOT / "docs" / "deploy" / "quickstart-kubernetes.md").read_text()
    manifests = list(yaml.safe_load_all(helm("template", "pdserve", str(CHART)).stdout))
    names = {f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in manifests if manifest}
    mentioned = set(re.findall(r"(?:deployment|service)/[a-z-]+", text))
    assert mentioned == {"deployment/pdserve-router", "service/pdserve"}
    assert mentioned <= names
    secret = yaml.safe_load((CHART / "values.yaml").read_text())["valkey"]["existingSecret"]
    assert f"create secret generic {secret} " in text
