"""A real headless Chromium, driven over the WebDriver protocol by chromedriver. Standard library only."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_START_LIMIT_S = 60.0
_WAIT_LIMIT_S = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
TAB, ENTER, SPACE, SHIFT, ESCAPE = "\ue004", "\ue007", " ", "\ue008", "\ue00c"


class Browser:
    """One tab. Elements are opaque ids."""

    def __init__(self, driver_url: str, session: str) -> None:
        self._url = f"{driver_url}/session/{session}"

    def open(self, url: str) -> None:
        self._call("POST", "url", {"url": url})

    def script(self, source: str, *arguments: object) -> Any:
        """Run the body of a function in the page; its result."""
        return self._call("POST", "execute/sync", {"script": source, "args": list(arguments)})

    def wait(self, source: str, *arguments: object) -> Any:
        """The first truthy result of `source`, tried again until then."""
        deadline_s = time.monotonic() + _WAIT_LIMIT_S
        while not (result := self.script(source, *arguments)):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"never true: {source}\n{self.script('return document.body.innerText')[:3000]}")
            time.sleep(0.05)
        return result

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0]).innerText", selector))

    def click(self, selector: str) -> None:
        element = self._call("POST", "element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._call("POST", f"element/{element}/click", {})

    def point(self, selector: str) -> None:
        """Move the pointer over the middle of an element."""
        element = self._call("POST", "element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": element}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._call("POST", "actions", {"actions": [pointer]})

    def type(self, selector: str, text: str) -> None:
        element = self._call("POST", "element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._call("POST", f"element/{element}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Keys go to whatever has the focus."""
        actions = [
            action for key in keys for action in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
        ]
        self._call("POST", "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def accept_dialog(self) -> str:
        """The text of the open confirm(), which is answered with yes."""
        text = str(self._call("GET", "alert/text"))
        self._call("POST", "alert/accept", {})
        return text

    def set_window(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def set_dark(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def devtools(self, command: str, **parameters: object) -> Any:
        return self._call("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def console(self) -> list[str]:
        """What the page complained about since it was asked last."""
        return [f"{entry['level']} {entry['message']}" for entry in self._call("POST", "se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "screenshot")))

    def quit(self) -> None:
        self._call("DELETE", "")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        return call(method, f"{self._url}/{path}".rstrip("/"), body)


def call(method: str, url: str, body: object = None) -> Any:
    """One WebDriver command."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.read().decode(errors='replace')[:600]}") from error


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start chromedriver and a browser; both are gone afterwards."""
    assert CHROMIUM is not None
    assert CHROMEDRIVER is not None
    port = free_port()
    driver = subprocess.Popen(
        [CHROMEDRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: call("GET", f"{url}/status")["ready"], driver)
        session = call("POST", f"{url}/session", {"capabilities": {"alwaysMatch": _capabilities(CHROMIUM, profile)}})
        tab = Browser(url, session["sessionId"])
        yield tab
        tab.quit()
    finally:
        driver.kill()
        driver.wait()


def _capabilities(chromium: str, profile: Path) -> dict[str, object]:
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    arguments += [
        "--disable-background-networking",
        "--disable-extensions",
        "--mute-audio",
        f"--user-data-dir={profile}",
    ]
    preferences = {"download.default_directory": str(profile), "download.prompt_for_download": False}
    return {
        "browserName": "chrome",
        "unhandledPromptBehavior": "ignore",
        "goog:chromeOptions": {"binary": chromium, "args": arguments, "prefs": preferences},
        "goog:loggingPrefs": {"browser": "ALL"},
    }


def _until(is_so: Callable[[], object], driver: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            if is_so():
                return
        except OSError:
            pass
        assert driver.poll() is None, "chromedriver ended"
        assert time.monotonic() < deadline_s, "chromedriver does not answer"
        time.sleep(0.05)
