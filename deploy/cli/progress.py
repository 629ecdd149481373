"""What commands say while they work."""

import sys


def progress(who: str, what: str) -> None:
    """One line on stderr about what is happening, for the person who waits."""
    print(f"==> {who}: {what}", file=sys.stderr, flush=True)
