"""A headless Chromium, spoken to through its DevTools protocol over two pipes: no driver, no socket, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
FLAGS = (
    "--headless",
    "--no-sandbox",  # it would not start as root, as in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
START = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(given), fcntl.F_DUPFD, 10) for given in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads its commands from descriptor 3 and answers at 4."""

PATIENCE = 60.0
"""Seconds to wait for an answer, on a machine that does other things besides."""

KEYS = {"Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}


class BrowserError(Exception):
    """What the browser answered with an error, or did not answer."""


def installed() -> str | None:
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Tab:
    """A page in the browser. ``problems`` are its console's errors and warnings, and what its scripts have thrown;
    ``requests`` are the addresses that it asked for."""

    process: subprocess.Popen[bytes]
    reads: int
    writes: int
    session: str = ""
    number: int = 0
    rest: bytes = b""
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result.

        Raises:
            BrowserError: the command failed.
        """
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != self.number:
                self._note(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, file: Path, width: int = 1280, height: int = 900) -> None:
        """Opens a file and waits until its script is done, or has failed."""
        self.resize(width, height)
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.done")

    def resize(self, width: int, height: int = 900) -> None:
        """Makes the window that large, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def see(self, *, media: str = "", scheme: str = "light") -> None:
        """As it is seen on a screen or in ``print``, ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression.

        Raises:
            BrowserError: it threw.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until the expression is true.

        Raises:
            BrowserError: it was not, for long.
        """
        end = time.monotonic() + PATIENCE
        while not self.ask(expression):
            if time.monotonic() > end:
                raise BrowserError(f"it was never so: {expression}; {self.problems}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Waits for two frames: what a page draws in an animation frame is there."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def press(self, key: str) -> None:
        """Presses a key, by its name, or types a character."""
        code = KEYS.get(key)
        both: dict[str, Any] = {"key": key} | ({"windowsVirtualKeyCode": code, "code": key} if code else {})
        text = {"text": "\r" if key == "Enter" else key} if not code or key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **both, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)
        self.settle()

    def click(self, selector: str) -> None:
        """Clicks into the middle of the first element of that selector."""
        x, y = self.ask(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)});"
            " it.scrollIntoView({block: 'center', behavior: 'instant'}); const box = it.getBoundingClientRect();"
            " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Writes a PNG of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def pdf(self, file: Path) -> None:
        """Prints the page."""
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self.reads, 1 << 16) if ready else b""
            if not piece:
                raise BrowserError("the browser does not answer")
            self.rest += piece
        message, _, self.rest = self.rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: Mapping[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(given["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(str(given["args"]))
            case "Log.entryAdded":
                self.problems.append(str(given["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])


@contextlib.contextmanager
def browser(program: str) -> Iterator[Tab]:
    """A new browser with one empty tab; it is gone afterwards, with all that it wrote."""
    with tempfile.TemporaryDirectory(prefix="ampdbg-browser-", ignore_cleanup_errors=True) as folder:
        to_it, writes = os.pipe()
        reads, from_it = os.pipe()
        started = [sys.executable, "-c", START, str(to_it), str(from_it)]
        process = subprocess.Popen(
            [*started, program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(to_it, from_it), start_new_session=True,
        )  # fmt: skip
        os.close(to_it)
        os.close(from_it)
        try:
            tab = Tab(process, reads, writes)
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.call(f"{domain}.enable")
            yield tab
        finally:
            os.close(writes)
            os.close(reads)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()
