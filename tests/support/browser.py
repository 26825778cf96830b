"""Controls a headless Chromium over a pipe, without additional packages, ports or network."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EXECUTABLE = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
NO_BROWSER = "Chromium is not installed (apt-get install chromium), and $CHROMIUM is not set"


class PageReloaded(Exception):
    """The page reloaded itself while it evaluated an expression."""


class Browser:
    """A page in Chromium, with its console errors and requests since it was opened."""

    def __init__(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False):
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.TemporaryDirectory()
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        # Chromium reads commands from file descriptor 3 and writes responses to file descriptor 4.
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{to_browser} 4>&{to_us}',
                "bash",
                EXECUTABLE,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={self._folder.name}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            pass_fds=(to_browser, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        self._commands, self._answers = os.fdopen(from_us, "wb"), os.fdopen(from_browser, "rb")
        self._number, self._session, self._rest = 0, None, b""
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(item["targetId"] for item in targets if item["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.open(url)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        is_there = False
        while not is_there:  # The browser also loads an empty page once when it starts.
            self._until(lambda event: event.get("method") == "Page.loadEventFired")
            is_there = self.run(
                f"location.protocol === {json.dumps(url.partition(':')[0] + ':')} && "
                "document.readyState === 'complete'"
            )

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression, after waiting for it if it is a promise.

        If the page reloads itself in the meantime, the expression is evaluated in the new page.
        """
        answer = None
        while answer is None:
            with contextlib.suppress(PageReloaded):
                answer = self.send(
                    "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
                )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression is true; fails after 30 s."""
        self.run(
            "new Promise((done, fail) => { const end = performance.now() + 30000; (function ask() {"
            f"if ({condition}) done(); else if (performance.now() > end) fail('waited in vain');"
            "else setTimeout(ask, 10); })(); })"
        )

    def type(self, text: str) -> None:
        for letter in text:
            self.send("Input.insertText", text=letter)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **({"text": "\r"} if key == "Enter" else {}),
            )

    def screenshot(self, file: Path) -> None:
        data = self.send("Page.captureScreenshot")["data"]
        file.write_bytes(base64.b64decode(data))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the Chrome DevTools Protocol and returns the response."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        answer = self._until(lambda event: event.get("id") == self._number)
        if "navigated" in answer.get("error", {}).get("message", ""):
            raise PageReloaded
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, is_wanted: Any) -> dict[str, Any]:
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._answers.fileno(), 1 << 16)
                assert data, "the browser ended"
                self._rest += data
            message, self._rest = self._rest.split(b"\0", 1)
            event = json.loads(message)
            self._note(event)
            if is_wanted(event):
                return event

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])

    def close(self) -> None:
        if self._process.poll() is None:
            self.send("Browser.close")
        self._process.wait(timeout=20)
        self._commands.close()
        self._answers.close()
        self._folder.cleanup()
