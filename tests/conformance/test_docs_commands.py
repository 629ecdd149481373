"""`make docs-check` finds every command of README and docs and knows how to try it."""

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.tools.docs_check import Outcome, Shell, pages
from tests.tools.docs_commands import Command, How, commands_of, filled_in, rule_of

PAGE = """
Text with `make demo` and `pdserve explain REQUEST_ID`; `proto/x` is no command.

    curl -N http://127.0.0.1:8000/v1/x -d '{
      "a": 1}'

    kubectl apply -f - <<'EOF'
    kind: X
    EOF

    The capital of France is Paris.

```
helm install x \\
  --set a=b
pdserve up --routers 2            # on ports 8000 and 8001
KEY=1 pdserve up
```

```
$ pdserve top --once
pdserve 0.1.0  a-model  ready
  pdserve explain --last   (then: pdserve status)
```
"""


def test_commands_are_found_whole_and_nothing_else_is() -> None:
    assert [command.text for command in commands_of("page", PAGE)] == [
        "make demo",
        "pdserve explain REQUEST_ID",
        "curl -N http://127.0.0.1:8000/v1/x -d '{\n\"a\": 1}'",
        "kubectl apply -f - <<'EOF'\nkind: X\nEOF",
        "helm install x \\\n--set a=b",
        "pdserve up --routers 2",
        "KEY=1 pdserve up",
        "pdserve top --once",
    ]


def test_every_command_of_every_page_has_a_rule() -> None:
    commands = [command for page in pages(ROOT) for command in commands_of(page.name, page.read_text())]
    assert len(commands) > 80
    assert [command for command in commands if rule_of(command) is None] == []


def test_what_cannot_be_run_here_says_why() -> None:
    commands = [command for page in pages(ROOT) for command in commands_of(page.name, page.read_text())]
    rules = [rule for command in commands if (rule := rule_of(command))]
    assert {rule.how for rule in rules} == set(How)
    assert [rule for rule in rules if rule.how is How.NOT_RUN and not rule.why] == []


def test_placeholders_are_filled_in() -> None:
    assert filled_in(Command("p", 1, "pdserve drain WORKER")) == "pdserve drain decode-0"
    assert filled_in(Command("p", 1, "pdserve explain ID")) == "pdserve explain --last"


def test_a_check_does_not_run_itself_nor_what_takes_an_hour() -> None:
    rules = {text: rule_of(Command("p", 1, text)) for text in ("make docs-check", "make mutation", "pdserve top")}
    assert [rule and rule.how for rule in rules.values()] == [How.NOT_RUN, How.LONG, How.MENTION]


class _Noted(Shell):
    """Starts nothing."""

    def __init__(self, clone: Path) -> None:
        super().__init__(clone, has_long=False)
        self.started: list[str] = []

    def _serve(self, command: Command) -> Outcome:
        self._servers.append(None)  # type: ignore[arg-type]
        return self._run(command, How.SERVE)

    def _run(self, command: Command, how: How) -> Outcome:
        self.started.append(command.text)
        return Outcome(command, "ok")


def test_a_server_is_there_for_commands_of_a_page_that_starts_none(tmp_path: Path) -> None:
    shell = _Noted(tmp_path)
    for text in ("pdserve doctor", "pdserve explain", "pdserve status", "curl localhost", "pdserve explain ID"):
        shell.try_out(Command("p", 1, text))
    first = ["pdserve doctor", "pdserve explain --help", "pdserve up", "pdserve status", "curl localhost"]
    assert shell.started == [*first, "pdserve generate Hello", "pdserve explain ID"]


def test_a_server_that_ended_by_itself_ends_no_check(tmp_path: Path) -> None:
    shell = Shell(tmp_path, has_long=False)
    assert shell._serve(Command("p", 1, "false")).text == "ended with 1"
    shell.close()


def test_a_command_that_fails_or_is_unknown_is_a_failure(tmp_path: Path) -> None:
    shell = Shell(tmp_path, has_long=False)
    python = f"{sys.executable} -c"
    subprocess.run(["ln", "-s", sys.executable, str(tmp_path / "python")], check=True)
    assert shell.try_out(Command("p", 1, "make no-such-target")).is_failure
    assert shell.try_out(Command("p", 1, f"frobnicate {python}")).is_failure
    outcome = shell.try_out(Command("p", 1, "make gpu"))
    assert (outcome.text, outcome.is_failure) == ("not run: needs a GPU", False)
    assert shell.try_out(Command("p", 1, "make test")).text == "not run: takes many minutes (--long)"
