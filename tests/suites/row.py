"""What a suite says: one row per claim. Pure but for its children's output."""

from dataclasses import dataclass

MAX_NOTE = 300


@dataclass(frozen=True, slots=True)
class Row:
    """`outcome`: passes, fails, skipped, or not run (the suite itself could not be used)."""

    suite: str
    name: str
    outcome: str
    note: str = ""

    @property
    def line(self) -> str:
        """As a row of a Markdown table."""
        note = " ".join(self.note.replace("|", "/").split())[:MAX_NOTE]
        return f"| {self.name} | {self.outcome}{': ' + note if note else ''} |"


def table(rows: list[Row]) -> str:
    """A Markdown table per suite."""
    lines = []
    for suite in dict.fromkeys(row.suite for row in rows):
        own = [row for row in rows if row.suite == suite]
        passed = sum(row.outcome == "passes" for row in own)
        lines += [
            f"## {suite}: {passed} of {len(own)}",
            "",
            "| row | result |",
            "|---|---|",
        ]
        lines += [*(row.line for row in own), ""]
    return "\n".join(lines)
