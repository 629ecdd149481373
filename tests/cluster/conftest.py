"""Every test here starts real clusters; they are slow and marked so."""

from pathlib import Path

import pytest

from common.checkpoint.demo_model import fetch_demo_model
from tests.tiny_model import write_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real 135M-parameter model."""
    return fetch_demo_model(print)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded model that computes in microseconds: for tests of everything around it."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
