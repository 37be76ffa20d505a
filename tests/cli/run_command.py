"""The command, in a process forked from one that has imported what it needs."""

from __future__ import annotations

import os
import sys

from resume_adapters.cli import main

os.dup2(os.open(os.environ["COMMAND_ERRORS"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
sys.argv[0] = "-c"  # as an interpreter has it that is given the program in a word
main()
