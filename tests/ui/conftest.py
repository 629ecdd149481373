"""The browser and the page that these tests share; skipped where there is no Chromium."""

from collections.abc import Iterator

import pytest

from tests.ui.browser import CHROMEDRIVER, CHROMIUM, Browser, browser
from tests.ui.page_service import Served, served


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("no chromium and chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.set_window(1400, 1300)
        yield opened


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    with served() as started:
        yield started
