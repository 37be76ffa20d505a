"""What is said where a store does not answer, and what it must not show."""

from __future__ import annotations

import re
from collections.abc import Mapping

from resume_adapters.errors import TierUnavailable

_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
"""What the names of environment variables have whose values are not to be shown."""

_SIGNED = re.compile(r"[?&][^\s\"'>]*(?:sig|Signature|Credential|Token)=[^\s\"'>]*", re.IGNORECASE)

_USER = re.compile(r"://[^/\s@]+@")
"""The user and the password in a URL, such as that of a proxy."""


class Secrets:
    """The credentials in the environment.

    Args:
        environment: the environment variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._hidden = sorted(
            (value for name, value in environment.items() if _SECRET.search(name.upper()) and len(value) >= 6),
            key=len,
            reverse=True,
        )

    def hide(self, text: str) -> str:
        """Return the first line of a message, without credentials and signatures."""
        line = _USER.sub("://***@", _SIGNED.sub("", text.partition("\n")[0]))
        for value in self._hidden:
            line = line.replace(value, "***")
        return line[:300].rstrip(". ")

    def unavailable(self, doing: str, where: str, error: Exception) -> TierUnavailable:
        """Return what to raise for a request that failed.

        The client's own message may show how a request was signed: of it only the first line is kept, without
        credentials. So raise it ``from None``.

        Args:
            doing: the request, as a verb.
            where: the URL of the object, or of the store.
            error: what the client has raised.
        """
        return TierUnavailable(
            f"could not {doing} {where.rstrip('/')}: {self.hide(str(error) or type(error).__name__)}. Check that the "
            "store can be reached, and that the credentials in the environment may do so"
        )
