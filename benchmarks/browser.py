"""A headless Chromium, driven through the pipe of its DevTools protocol, and pages of `async-ckpt page` in it.

In: HTML files. Out: what a browser shows of them, and when. Knows nothing of: figures, tests.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any, Final, Self

MISSING: Final = "no Chromium on this machine: apt-get install chromium"
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_DEADLINE_SECONDS: Final = 60.0
# In the child, the ends of the pipe become 3 and 4, so here they have higher numbers.
_FREE_FD: Final = 10
# The milliseconds from the navigation until all pictures were drawn.
_DRAWN: Final = """new Promise((resolve) => {
  const look = () => document.documentElement?.dataset.drawn && resolve(Number(document.documentElement.dataset.drawn));
  new MutationObserver(look).observe(document, { attributes: true, subtree: true });
  look();
})"""


def program() -> str | None:
    """The browser of this machine; None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Chromium:
    """One process of the browser, for pages one after the other. Used from one thread."""

    def __init__(self, program: str, profile: Path) -> None:
        (theirs_in, self._to), (self._from, theirs_out) = self._pipe(), self._pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]

        def to_its_numbers() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._child = subprocess.Popen(
            [program, *options],
            pass_fds=(3, 4),
            preexec_fn=to_its_numbers,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    @staticmethod
    def _pipe() -> list[int]:
        ends = os.pipe()
        moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FREE_FD) for end in ends]
        for end in ends:
            os.close(end)
        return moved

    def ask(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result. Events that arrive meanwhile go to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = monotonic() + _DEADLINE_SECONDS
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._from], [], [], max(0.0, until - monotonic()))[0], "Chromium does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "Chromium has ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        os.close(self._from)
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait(10)


class OpenPage:
    """A page of a run in the browser, after all pictures were drawn."""

    def __init__(self, browser: Chromium, file: Path, *, width: int, height: int, dark: bool, drawn: bool) -> None:
        self._browser = browser
        self.target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.ask("Target.attachToTarget", targetId=self.target, flatten=True)
        self._session = attached["sessionId"]
        browser.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setTimezoneOverride", timezoneId="America/New_York")
        self.size(width, height)
        self.scheme(dark=dark)
        self.ask("Page.navigate", url=file.resolve().as_uri())
        self.drawn_seconds = self.evaluate(_DRAWN) / 1e3 if drawn else nan

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **arguments)

    def size(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def scheme(self, *, dark: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression on the page. A promise is awaited."""
        told = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The shown texts of all elements that match a selector."""
        found: list[str] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)"
        )
        return found

    def press(self, key: str) -> None:
        """Press a key, at the element that has the focus."""
        named = {"windowsVirtualKeyCode": {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)}
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **named, **(text if kind == "keyDown" else {}))

    def mouse(self, kind: str, x: float, y: float) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def box(self, selector: str) -> dict[str, float]:
        """The position of an element in the window, after scrolling it into view."""
        found: dict[str, float] = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{ block: 'center' }});"
            " return e.getBoundingClientRect().toJSON(); })()"
        )
        return found

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG file."""
        told = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(told["data"]))

    def complaints(self) -> list[str]:
        """The errors and refusals that the browser has recorded, and the page's requests to the network."""
        self.evaluate("1")  # then all earlier events have arrived
        found = []
        for one in self._browser.events:
            if one["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(one["params"]))
            elif one["method"] == "Network.requestWillBeSent" and not one["params"]["request"]["url"].startswith(
                "file:"
            ):
                found.append(one["params"]["request"]["url"])
        return found


@contextmanager
def opened(
    browser: Chromium, file: Path, *, width: int = 1440, height: int = 900, dark: bool = False, drawn: bool = True
) -> Iterator[OpenPage]:
    """A page in a window of this size, after its pictures were drawn, or at once without `drawn`."""
    page = OpenPage(browser, file, width=width, height=height, dark=dark, drawn=drawn)
    yield page
    browser.ask("Target.closeTarget", targetId=page.target)
