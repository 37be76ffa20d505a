"""A Slurm of one node on this machine: munged, slurmctld and slurmd, as root, below one directory, and then gone."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launch import free_port

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
MailProg=/bin/true
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running Slurm.

    Args:
        root: where everything of it lies.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("state", "spool"):
            (self.root / name).mkdir()
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        text = CONFIGURATION.format(host=host, root=self.root, ports=[free_port(), free_port()])
        (self.root / "slurm.conf").write_text(text)
        names = ("socket", "pid", "log", "seed")
        options = [f"--{name}{'' if name == 'socket' else '-file'}={self.root}/munge.{name}" for name in names]
        self._daemon("munged", "--foreground", f"--key-file={key}", *options)
        _wait(lambda: (self.root / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", "node")
        _wait(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T", check=False), "the node")

    def _daemon(self, *command: str) -> None:
        log = open(self.root / f"{command[0]}.out", "wb")  # noqa: SIM115  # the daemon's, for as long as it lives
        self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def ask(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def logs(self) -> str:
        """Return what the daemons have logged last."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-6000:]}" for path in sorted(self.root.glob("slurm*.log")))

    def stop(self) -> None:
        """End every job and every daemon."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.ask("scancel", "--user=root", "--signal=KILL", check=False)
            self.ask("scancel", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Start a cluster and stop it, whatever happens in between."""
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    root.chmod(0o755)  # munged wants its socket where everybody may come
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(root)


def _wait(is_there: object, what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not is_there():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} does not come up"
        time.sleep(0.1)
