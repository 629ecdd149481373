"""What tests of the page do again and again."""

from tests.ui.browser import Browser


def select(tab: Browser, request_id: str) -> None:
    tab.script(
        "[...document.querySelectorAll('#requests button')].find(b => b.textContent === arguments[0]).click()",
        request_id,
    )
    tab.wait("return document.querySelector('#detail h3')?.textContent === arguments[0]", request_id)
