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


@pytest.fixture(autouse=True)
def opened(tab: Browser, page: Served) -> Iterator[None]:
    """The page, freshly loaded and filled; no test may leave an error on the console."""
    tab.open(page.url)
    tab.wait("return document.querySelectorAll('#requests tr').length > 3")
    tab.console()
    yield
    assert [line for line in tab.console() if line.startswith(("SEVERE", "WARNING"))] == []
