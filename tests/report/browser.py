"""A real headless Chromium, driven over a pipe by its DevTools protocol; nothing to install."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "no Chromium: install the Debian package `chromium`, or put one of these on the PATH: "
    + ", ".join(NAMES)
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
Message = dict[str, Any]


def find() -> str | None:
    """Return the path of a browser, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: its answers, and everything that it complained about or asked for."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._buffer, self._last = b"", 0
        self._session: str | None = None
        self.events: list[Message] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> Message:
        """Send a command and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60.0)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self, seconds: float) -> Message:
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._reader, 1 << 20)
            assert read, "the browser ended"
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def open(self, path: Path) -> None:
        """Load a file and wait until its script ran."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(60.0))

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Enter": 13, "Tab": 9, "Space": 32, "ArrowRight": 39, "End": 35}
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        common = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": codes[key],
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def size(self, width: int, height: int) -> None:
        """Set the size of the window; below 600 pixels it is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def media(self, medium: str = "", scheme: str = "light") -> None:
        """Set the medium (`print`) and the colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def picture(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """Return a screenshot as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        content = base64.b64decode(data)
        if path is not None:
            path.write_bytes(content)
        return content

    def complaints(self) -> list[str]:
        """Return errors, warnings and exceptions since the page was opened."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Return the addresses of everything that was asked for since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def opened() -> Iterator[Page]:
    """Start a browser with one tab, and end it."""
    program = find()
    assert program is not None, MISSING
    commands, answers = os.pipe(), os.pipe()

    def connect() -> None:
        high = [os.dup(commands[0]), os.dup(answers[1])]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,  # noqa: PLW1509 - no thread of ours runs here
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            yield Page(answers[0], commands[1])
        finally:
            os.close(commands[1])
            os.close(answers[0])
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
