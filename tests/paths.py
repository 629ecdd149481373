"""Where tests find files of the repository. Values only."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN_FILE = ROOT / "tests" / "golden" / "smollm2_greedy.json"
