"""Look at the built site in a headless Chromium: ``browser.py [SITE] [SCREENSHOTS]``.

It searches for what people search for, in the site as it lies on the disk and as it is served, fails where a word leads
nowhere or a page logs an error, and takes screenshots for a person to look at.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORDS = {
    "s3": "environments",
    "docker": "environments",
    "windows": "environments",
    "OOM": "troubleshooting",
    "NCCL timeout": "troubleshooting",
    "corrupt checkpoint": "troubleshooting",
    "TRL": "hf",
    "preemption": "",
    "axolotl": "getting-started",
}
"""What people search for, and the page that must be among the results; empty where any page will do."""

PICTURES = {
    "home": ("index.html", (1280, 900), "light"),
    "framework": ("hf.html", (1280, 2400), "light"),
    "api": ("api.html", (1280, 1600), "light"),
    "search": ("index.html?q=docker", (1280, 900), "light"),
    "phone": ("index.html", (412, 900), "light"),
    "phone-table": ("getting-started.html", (412, 1600), "light"),
    "dark": ("format.html", (1280, 2400), "dark"),
}
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
_RESULTS = "[...document.querySelectorAll('a.md-search-result__link')].map(each => each.href)"
_CUT = (
    "[...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
)


class Browser:
    """A Chromium without a window, steered through a pipe (``--remote-debugging-pipe``)."""

    def __init__(self, profile: Path) -> None:
        found = next(filter(None, map(shutil.which, _CHROMIUMS)), None)
        if found is None:
            raise SystemExit(f"there is none of {', '.join(_CHROMIUMS)}: apt-get install chromium")
        (reads, self._to), (self._from, writes) = os.pipe(), os.pipe()
        options = f"--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {found} {options} about:blank 3<&{reads} 4>&{writes}"],
            pass_fds=(reads, writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._rest, self._last, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.errors: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, url: str, size: tuple[int, int] = (1280, 900), scheme: str = "light") -> None:
        """Open a page, and wait until it is loaded."""
        width, height = size
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.evaluate("try { localStorage.clear() } catch {}")  # the colours that a page remembers
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.errors.clear()  # of the page before, whose requests are cut off
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({url.partition('?')[0]!r}) && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str, seconds: float = 15.0) -> Any:
        """Return the value of an expression once it is true; what it is at the end of the time if it never is."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)) and time.monotonic() < end:
            time.sleep(0.1)
        return value

    def picture(self, file: Path) -> None:
        """Write a screenshot of the page."""
        time.sleep(0.5)  # transitions
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site on this machine, and yield its address."""
    handler = functools.partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def problems(browser: Browser, base: str) -> Iterator[str]:
    """Yield what is wrong with the search of a site."""
    for word, page in WORDS.items():
        browser.open(f"{base}/index.html?q={word.replace(' ', '%20')}")
        browser.wait(f"{_RESULTS}.length > 0")
        found = browser.evaluate(_RESULTS)
        if not any(page in each for each in found):
            yield f"{base}: {word!r} leads to {found or 'nothing'}; expected {page or 'a page'}"
        yield from (f"{base}: {word!r}: {error}" for error in browser.errors)


def cut_lines(browser: Browser, base: str) -> Iterator[str]:
    """Yield the examples whose lines do not fit at 1280 pixels, where the line that matters is among them."""
    for page in ("hf", "lightning", "accelerate", "deepspeed", "getting-started", "plain_loop"):
        browser.open(f"{base}/{page}.html")
        for code in browser.evaluate(_CUT):
            longest = max(code.splitlines(), key=len)
            if "Resume" in longest or "register_for_resume" in longest:
                yield f"{page}: cut at 1280 pixels: {longest.strip()}"


def main() -> None:
    """Check the search and the examples, take the screenshots, and end with 1 where something is wrong."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    screenshots = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "site-screenshots"
    screenshots.mkdir(exist_ok=True)
    on_disk = site.resolve().as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile))
        try:
            found = [*problems(browser, on_disk), *cut_lines(browser, on_disk)]
            with served(site) as address:
                found += problems(browser, address)
            for name, (page, size, scheme) in PICTURES.items():
                browser.open(f"{on_disk}/{page}", size, scheme)
                if "?q=" in page:
                    browser.wait(f"{_RESULTS}.length > 0")
                browser.picture(screenshots / f"{name}.png")
        finally:
            browser.close()
    print(*found, f"{len(PICTURES)} screenshots in {screenshots}", sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
