"""What the tests of fronts and text share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real 135M-parameter model; only its metadata is read here."""
    from common.checkpoint.demo_model import fetch_demo_model

    return fetch_demo_model(print)
