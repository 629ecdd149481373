"""Every test here starts real clusters or shares one; they are slow and marked so."""

from collections.abc import Generator
from pathlib import Path

import pytest

from common.checkpoint.demo_model import fetch_demo_model
from tests.cluster.cluster import Cluster
from tests.tiny_model import write_tiny_model

# The demo model in float32 gives some nine tokens a second on a core without AVX-512.
LIMIT_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what the cluster said that it shares with others."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        clusters = [value for value in item.funcargs.values() if isinstance(value, Cluster)]
        report.sections += [("cluster", cluster.log_tail()) for cluster in clusters]
    return report


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real 135M-parameter model."""
    return fetch_demo_model(print)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded model that computes in microseconds: for tests of everything around it."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
