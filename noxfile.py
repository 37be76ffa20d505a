"""The project's sessions. ``nox -s <session> -- <arguments>`` passes the arguments through; environments are reused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.options.sessions = ["lint", "typing", "tests"]
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = Path(__file__).parent / "constraints.txt"


def install(session: nox.Session, *what: str) -> None:
    """Install with the pinned versions: without them torch may bring gigabytes of accelerator libraries along."""
    session.install("-c", str(CONSTRAINTS), *what)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test; none may be skipped because a framework is missing."""
    install(session, "-e", ".[test-all]")
    arguments = session.posargs or ["-n", "2", "--dist", "loadgroup"]
    required = {"RESUME_ADAPTERS_REQUIRE": "hf,lightning,accelerate,deepspeed"}
    session.run("python", "-m", "pytest", *arguments, env=required)


@nox.session
def core(session: nox.Session) -> None:
    """Run the tests of the core and the command line where no training framework is installed."""
    install(session, "-e", ".[test]")
    absent = "import importlib.util as u; assert not any(map(u.find_spec, ('transformers', 'accelerate', 'lightning')))"
    session.run("python", "-c", absent)
    arguments = session.posargs or ["-n", "2", "--dist", "loadgroup", "tests/core", "tests/cli"]
    session.run("python", "-m", "pytest", *arguments)


@nox.session
def slurm(session: nox.Session) -> None:
    """Run one job through a real Slurm: installed from Debian, started on this machine, and stopped again."""
    if os.geteuid() != 0:
        session.skip("starting Slurm's daemons needs root")
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing and shutil.which("apt-get") is None:
        session.skip(f"{', '.join(missing)} are missing, and there is no apt-get to install them")
    if missing:
        session.run("apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge", external=True)
    install(session, "-e", ".[test-hf]")
    environment = {"RESUME_ADAPTERS_SLURM": "1", "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", "tests/slurm", *session.posargs, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    install(session, "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)


@nox.session
def typing(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, "-e", ".[hf,cli,plots]", "mypy")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site, and refuse a link that leads nowhere."""
    install(session, "-e", ".[docs]", "ruff")  # ruff formats the signatures
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure what each adapter costs, side by side with its bare framework."""
    install(session, "-e", ".[hf,lightning,accelerate,deepspeed,cli]")
    session.run("python", "-m", "benchmarks", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(reuse_venv=False)
def wheel(session: nox.Session) -> None:
    """Build the wheel, install it where nothing else is, import it and start the command."""
    built = Path(session.create_tmp()) / "wheel"
    for old in built.glob("*.whl"):
        old.unlink()
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), ".")
    (package,) = built.glob("resume_adapters-*.whl")
    install(session, f"{package}[cli]")
    with session.chdir(built):
        session.run("python", "-c", "import resume_adapters; print(resume_adapters.__version__)")
        session.run("resume-adapters", "--help")
