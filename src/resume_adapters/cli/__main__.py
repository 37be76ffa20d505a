"""``python -m resume_adapters.cli`` is the command."""

from resume_adapters.cli import main

main()
