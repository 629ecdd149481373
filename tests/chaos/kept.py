"""Results that stay: copied from `build/` to `tests/chaos/data`, from which `docs/robustness.md` is drawn."""

import shutil
from pathlib import Path

from tests.tools import robustness_doc


def keep(output: Path) -> None:
    """The result as it is, problems and all, and the document with it."""
    shutil.copyfile(output, robustness_doc.DATA / output.name)
    robustness_doc.main(["--write"])
