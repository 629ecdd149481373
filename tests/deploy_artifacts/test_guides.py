"""The guides: their Helm commands pass the chart's schema, their values files too, their links lead somewhere."""

import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.deploy_artifacts.conftest import Helm
from tests.deploy_artifacts.toolbox import CHART, ROOT
from tests.tools.docs_commands import Command, commands_of

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
COMMANDS = [
    command
    for guide in GUIDES
    for command in commands_of(guide.name, guide.read_text())
    if "deploy/helm/pdserve" not in command.text
]


@pytest.mark.parametrize(("guide", "words"), CHART_COMMANDS, ids=[" ".join(words) for _, words in CHART_COMMANDS])
def test_the_chart_takes_what_the_guide_sets(helm: Helm, bare_helm: Helm, guide: str, words: list[str]) -> None:
    """An installation has to set all that is needed; an upgrade reuses it. A reader's own file is not here."""
    settings = [word for flag, word in pairwise(words) if flag == "--set"]
    files = [word for flag, word in pairwise(words) if flag == "--values" and (ROOT / word).is_file()]
    has_own_file = files != [word for flag, word in pairwise(words) if flag == "--values"]
    run = helm if words[1] == "upgrade" or has_own_file else bare_helm
    arguments = [argument for file in files for argument in ("--values", str(ROOT / file))]
    arguments += [argument for setting in settings for argument in ("--set", setting)]
    done = run("template", words[2], str(CHART), *arguments)
    assert done.returncode == 0, f"{guide}: {done.stderr}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{Path(command.page).name}:{command.line}")
def test_every_command_of_the_guides_goes_as_far_as_it_can_without_a_cluster(
    tools: Path, tmp_path: Path, command: Command
) -> None:
    """Objects are made on paper, manifests checked; of what needs a cluster, the command and its options exist."""
    words = shlex.split(command.text.partition("<<")[0], comments=True)
    match words[0]:
        case "kubectl" if "<<" in command.text:
            import kubernetes_validate

            kubernetes_validate.validate(yaml.safe_load(_here_document(command)), "1.34", strict=True)
        case "kubectl" if "create" in words:
            (tmp_path / "keys.yaml").touch()  # an earlier command's
            done = _run(tools, ["bash", "-c", f"{command.text} --dry-run=client --output name"], tmp_path)
            assert done.returncode == 0, done.stderr
        case "kubectl" | "helm":
            _check_options(tools, words)
        case other:
            assert other in ("pdserve", "curl", "docker", "export", "ray", "python"), command.text


def _run(tools: Path, words: list[str], cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=env)


def _here_document(command: Command) -> str:
    """With its indentation, which the command's text has lost."""
    lines = (ROOT / "docs" / "deploy" / command.page).read_text().splitlines()[command.line :]
    return "\n".join(line[4:] for line in itertools.takewhile(lambda line: line.strip() != "EOF", lines))


def _check_options(tools: Path, words: list[str]) -> None:
    """Of `kubectl --namespace serving rollout status ...`, `kubectl rollout status` has --namespace."""
    name = "namespace"
    plain = [word for flag, word in pairwise(words) if flag != f"--{name}" and not word.startswith("-")]
    depth = 2 if plain[0] in ("rollout", "repo") else 1
    done = _run(tools, [words[0], *plain[:depth], "--help"])
    shared = _run(tools, [words[0], "options" if words[0] == "kubectl" else "--help"])
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"--[a-z][\w-]*", done.stdout + shared.stdout))
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= known, used - known


def test_what_runs_in_the_guides_is_found() -> None:
    programs = {command.text.split()[0] for command in COMMANDS}
    assert programs == {"helm", "kubectl", "docker", "export", "pdserve", "curl", "ray", "python"}


def test_every_guide_with_an_installation_is_among_those_checked() -> None:
    assert {guide for guide, _ in CHART_COMMANDS} == {guide.name for guide in GUIDES}


def test_the_values_file_of_the_model_guide_is_accepted(bare_helm: Helm, tmp_path: Path) -> None:
    lines = code_lines((ROOT / "docs" / "deploy" / "change-the-model.md").read_text())
    start = lines.index("# llama.yaml")
    body = "\n".join(itertools.takewhile(lambda line: re.match(r" |[a-z]+:", line), lines[start + 1 :]))
    assert {"model", "image"} == set(yaml.safe_load(body))
    (tmp_path / "llama.yaml").write_text(body)
    files = ("--values", str(CHART / "values-gpu.yaml"), "--values", str(tmp_path / "llama.yaml"))
    done = bare_helm("template", "llama", str(CHART), *files)
    assert done.returncode == 0, done.stderr
    assert "nvidia.com/gpu: 1" in done.stdout


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_links_lead_to_files(guide: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", guide.read_text())
    missing = [target for target in targets if "://" not in target and not (guide.parent / target).exists()]
    assert missing == []


def test_names_in_the_quickstart_are_those_that_the_chart_makes(helm: Helm) -> None:
    """Deployment, Service and Secret of `helm install pdserve`."""
    text = (ROOT / "docs" / "deploy" / "quickstart-kubernetes.md").read_text()
    manifests = list(yaml.safe_load_all(helm("template", "pdserve", str(CHART)).stdout))
    names = {f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in manifests if manifest}
    mentioned = set(re.findall(r"(?:deployment|service)/[a-z-]+", text))
    assert mentioned == {"deployment/pdserve-router", "service/pdserve"}
    assert mentioned <= names
    secret = yaml.safe_load((CHART / "values.yaml").read_text())["valkey"]["existingSecret"]
    assert f"create secret generic {secret} " in text
