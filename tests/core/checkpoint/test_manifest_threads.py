"""Manifests are read on several threads: of saves, of copies, and of a server."""

from __future__ import annotations

import subprocess
import sys

from waiting import LIMIT

READ = """
import importlib, sys, threading

from resume_adapters.core.checkpoint import manifest as module

sys.setswitchinterval(1e-6)
for attempt in range(40):
    module = importlib.reload(module)  # as in a process that has read none yet
    entry = module.FileEntry("a", 1, "")
    found = module.Manifest(step=1, epoch=0.0, world_size=1, generation=1, written=0.0, reason="", files=(entry,))
    document, begin = module.encode_manifest(found), threading.Barrier(4)

    def read():
        begin.wait()
        module.decode_manifest(document)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_the_first_manifests_of_a_process_may_be_read_at_the_same_time() -> None:
    """It crashed now and then: msgspec makes what it knows of a class when that is decoded first."""
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
