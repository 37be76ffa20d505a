"""Turn the Sphinx roles of the docstrings into plain code, since the pages are Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")


_VERSION = re.compile(r'__version__ = "(.+)"')


def on_config(config: Any, **_: Any) -> Any:
    """Show the package's version at the foot of each page."""
    source = Path(__file__).parents[1] / "src" / "resume_adapters" / "_version.py"
    found = _VERSION.search(source.read_text())
    config.copyright = f"resume-adapters {found[1] if found else ''}"
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles in front of names."""
    return _ROLE.sub("", html).replace("<code>~resume_adapters.", "<code>resume_adapters.").replace("::</p>", ":</p>")
