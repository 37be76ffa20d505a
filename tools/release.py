"""Print the changelog's section of a version, if the package has that version: ``release.py 0.2.0``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def section(changelog: str, version: str) -> str:
    """Return the text below the heading of a version.

    Raises:
        ValueError: there is no such heading, or it has no date.
    """
    found = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`: name the version and its date")
    return found[1].strip()


def require_version(source: str, version: str) -> None:
    """Check the version of the package.

    Raises:
        ValueError: it has another one.
    """
    found = re.search(r'__version__ = "(.+)"', source)
    if found is None or found[1] != version:
        raise ValueError(f"the package is version {found and found[1]}, and the tag is v{version}: change one of them")


def main() -> None:
    """Check, and print the section."""
    version = sys.argv[1]
    require_version((ROOT / "src" / "resume_adapters" / "_version.py").read_text(), version)
    print(section((ROOT / "CHANGELOG.md").read_text(), version))


if __name__ == "__main__":
    main()
