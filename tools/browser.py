"""Look at the built site in a headless Chromium: ``browser.py [SITE] [SCREENSHOTS]``.

It searches for what people search for, in the site as it lies on the disk and as it is served, fails where a word leads
nowhere or a page logs an error, and takes screenshots for a person to look at.
"""

from __future__ import annotations

import functools
import html
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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
    "axolotl": "bring_your_script",
}
"""What people search for, and the page that must be among the results; empty where any page will do."""

PICTURES = {
    "home": ("index.html", (1280, 900), ()),
    "framework": ("hf.html", (1280, 2400), ()),
    "api": ("api.html", (1280, 1600), ()),
    "search": ("index.html?q=docker", (1280, 900), ()),
    "phone": ("index.html", (412, 900), ()),
    "phone-table": ("bring_your_script.html", (412, 1600), ()),
    "dark": ("index.html", (1280, 2400), ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")),
}
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
_RESULT = re.compile(r'<a href="([^"]+)" class="md-search-result__link"')


class Browser:
    """A Chromium without a window; each call is a new process."""

    def __init__(self) -> None:
        found = next(filter(None, map(shutil.which, _CHROMIUMS)), None)
        if found is None:
            raise SystemExit(f"there is none of {', '.join(_CHROMIUMS)}: apt-get install chromium")
        self._program = found

    def dom(self, url: str) -> tuple[str, list[str]]:
        """Return what a page is after its scripts have run, and the errors that it logged."""
        done = self._run("--dump-dom", "--virtual-time-budget=8000", "--enable-logging=stderr", url)
        errors = re.findall(r'CONSOLE[:(].*"(.*(?:Error|Failed).*)", source', done.stderr)
        return done.stdout, errors

    def picture(self, url: str, file: Path, size: tuple[int, int], options: tuple[str, ...]) -> None:
        """Take a screenshot."""
        width, height = size
        shot = (f"--screenshot={file}", f"--window-size={width},{height}", "--virtual-time-budget=5000")
        self._run(*shot, "--hide-scrollbars", *options, url)

    def _run(self, *options: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as profile:
            always = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}")
            return subprocess.run(
                [self._program, *always, "--allow-file-access-from-files", *options],
                capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip


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
        dom, errors = browser.dom(f"{base}/index.html?q={word.replace(' ', '%20')}")
        found = [html.unescape(each) for each in _RESULT.findall(dom)]
        yield from (f"{base}: {word!r}: {error}" for error in errors)
        if not any(page in each for each in found):
            yield f"{base}: {word!r} leads to {found or 'nothing'}; expected {page or 'a page'}"


def main() -> None:
    """Check the search, take the screenshots, and end with 1 where something is wrong."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    screenshots = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "site-screenshots"
    screenshots.mkdir(exist_ok=True)
    browser = Browser()
    on_disk = site.resolve().as_uri()
    found = [*problems(browser, on_disk)]
    with served(site) as address:
        found += problems(browser, address)
    for name, (page, size, options) in PICTURES.items():
        browser.picture(f"{on_disk}/{page}", screenshots / f"{name}.png", size, options)
    print(*found, f"{len(PICTURES)} screenshots in {screenshots}", sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
