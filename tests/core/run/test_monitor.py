"""What is done once a second never holds up the end of a run."""

import subprocess
import sys
import threading
import time

from torch.distributed import TCPStore

from resume_adapters.core.run.monitor import Monitor

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_duty_that_does_not_return_does_not_hold_up_the_end() -> None:
    begun, release, done = threading.Event(), threading.Event(), list[str]()

    def wait() -> None:
        begun.set()
        release.wait()

    monitor = Monitor({"wait": wait, "write": lambda: done.append("written")})
    monitor.start()
    assert begun.wait(20)

    ended = time.monotonic()
    monitor.stop()
    assert time.monotonic() - ended < 20

    release.set()
    monitor._thread.join(20)
    assert not done, "a duty began after the end"


def test_a_connection_to_a_server_that_has_died_does_not_hold_up_the_end() -> None:
    # The process with the store of a job's ranks may end first, in the second in which another connects to it.
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
        server.kill()
    begun = threading.Event()

    def connect() -> None:
        begun.set()
        store.clone()  # retries for five minutes

    monitor = Monitor({"connect": connect})
    monitor.start()
    assert begun.wait(20)

    ended = time.monotonic()
    monitor.stop()
    assert time.monotonic() - ended < 20
