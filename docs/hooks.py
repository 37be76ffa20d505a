"""Turn the Sphinx roles of the docstrings into plain code, since the pages are Markdown."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles in front of names."""
    return _ROLE.sub("", html).replace("<code>~resume_adapters.", "<code>resume_adapters.").replace("::</p>", ":</p>")
