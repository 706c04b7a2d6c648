"""Runs a part of the tests with every version that setup.cfg allows.

python -m tests.versions                            all of them; hours on two cores
python -m tests.versions py3.10-tf2.21-keras3.12    these
python -m tests.versions nightly                    Keras' nightly: what comes next
python -m tests.versions --list                     their names, and known results

For each Python, TensorFlow and Keras an environment of its own is made in a folder that
stays (`--folder`), with the other packages as pinned where TensorFlow and Keras allow
it. What runs is the tier `quick` and the whole framework contract. Each result is kept
with its commit: a second run does what is not there yet. The last lines are the rows of
the table in docs/notes/versions.md.

With the nightly the exactness rows run, too, anew each time. What is expected to differ
there stands in `tests/support/newer_keras.py`, with its day.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from tests.all_rows import REPOSITORY, commit

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TENSORFLOWS = ("2.20", "2.21")
#: The oldest that setup.cfg allows, and the newest that there is for the Python.
KERASES = ("3.12", "newest")
#: What TensorFlow and Keras pin themselves, each version in another way.
THEIRS = ("keras", "ml-dtypes", "protobuf", "tensorboard", "tensorflow")
CONTRACT = (
    "tests/devices/test_framework_contract.py",
    "tests/devices/test_private_overrides.py",
    "tests/pure/test_private_names.py",
)
NIGHTLY = "nightly"
#: What runs with the nightly besides.
EXACTNESS = (
    "tests/devices/test_array_orders.py",
    "tests/devices/test_defects.py",
    "tests/devices/test_fits_exact.py",
    "tests/devices/test_losses_exact.py",
    "tests/devices/test_metrics_exact.py",
    "tests/devices/test_steps_exact.py",
    "tests/processes/test_array_orders.py",
)
INSTALL_SECONDS = 3600
TESTS_SECONDS = 7200
CLOSING_LINE = re.compile(r"=* ?(\d+ \w+(, )?)+ in [\d.]+s( \([\d:]+\))? ?=*")
ROW = "| {python} | {tensorflow} | {keras} | {result} | {date} |"


@dataclasses.dataclass(frozen=True)
class Versions:
    """One combination, and the environment for it."""

    python: str
    tensorflow: str
    keras: str

    def __str__(self) -> str:
        if self.keras == NIGHTLY:
            return NIGHTLY
        return f"py{self.python}-tf{self.tensorflow}-keras{self.keras}"

    def requirements(self) -> list[str]:
        is_any = self.keras in ("newest", NIGHTLY)
        keras = "keras" if is_any else f"keras=={self.keras}.*"
        return [f"tensorflow-cpu=={self.tensorflow}.*", keras]


def all_versions() -> list[Versions]:
    return [
        Versions(python, tensorflow, keras)
        for python in PYTHONS
        for tensorflow in TENSORFLOWS
        for keras in KERASES
    ]


def versions_by_name() -> dict[str, Versions]:
    """All that can be asked for; the nightly only by its name."""
    nightly = Versions("3.11", TENSORFLOWS[-1], NIGHTLY)
    return {str(versions): versions for versions in [*all_versions(), nightly]}


def constraints_for_all(text: str) -> str:
    """The pins that do not depend on the versions of TensorFlow and Keras."""
    kept = [
        line
        for line in text.splitlines()
        if not re.split("[=<>;]", line.lower())[0].strip().startswith(THEIRS)
    ]
    return "\n".join(kept) + "\n"


def find_python(version: str) -> str | None:
    """A Python of this version: on PATH, of pyenv, or of uv; None: there is none."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [f"python{version}", *pyenv.glob(f"versions/{version}.*/bin/python")]
    if shutil.which("uv"):
        found = _output("uv", "python", "find", version)
        candidates += found.split() if found else []
    for candidate in candidates:
        # A shim of pyenv is there for versions that do not run.
        said = _output(str(candidate), "--version")
        if said and said.split()[-1].startswith(f"{version}."):
            return str(candidate)
    return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def make_environment(versions: Versions, folder: pathlib.Path) -> pathlib.Path:
    """Makes the environment, or takes what is there.

    Returns:
      Its Python.

    Raises:
      RuntimeError: when there is no such Python, or nothing could be installed.
    """
    python = folder / "bin" / "python"
    complete = folder / ".complete"
    if complete.exists():
        return python
    interpreter = find_python(versions.python)
    if interpreter is None:
        raise RuntimeError(f"there is no Python {versions.python}: pyenv or uv has it")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", folder], check=True, timeout=300)
    constraints = folder / "constraints.txt"
    pins = REPOSITORY.joinpath("constraints.txt").read_text("utf-8")
    constraints.write_text(constraints_for_all(pins), "utf-8")
    _install(
        folder,
        *("-c", constraints, "-e", f"{REPOSITORY}[examples,dev,tfds,grain,plots]"),
        *versions.requirements(),
    )
    complete.touch()
    return python


def _install(folder: pathlib.Path, *what: str | pathlib.Path) -> None:
    python = folder / "bin" / "python"
    # pip did not come to an end in 10 minutes for Python 3.10, uv did in seconds.
    uv = shutil.which("uv")
    command = [
        *((uv, "pip", "install") if uv else (python, "-m", "pip", "install")),
        *(("--python", python) if uv else ()),
        *("-q", *what),
    ]
    with open(folder / "install.txt", "a") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, timeout=INSTALL_SECONDS
        )
    if done.returncode:
        raise RuntimeError(f"not installed: see {folder / 'install.txt'}")


def install_nightly(folder: pathlib.Path) -> None:
    """Puts the newest nightly in the place of the Keras of an environment."""
    # Both have one folder of modules.
    remove = [folder / "bin" / "python", "-m", "pip", "uninstall", "-q", "-y"]
    subprocess.run([*remove, "keras", "keras-nightly"], check=True, timeout=300)
    _install(folder, "--no-deps", "--pre", "keras-nightly")


def run_tests(
    python: pathlib.Path, output: pathlib.Path, jobs: int, more: tuple[str, ...] = ()
) -> str:
    """Runs the tests, and gives pytest's closing line."""
    command = [
        *(python, "-m", "pytest", "--tier", "quick", "-n", str(jobs)),
        *("--dist", "loadfile", "--max-worker-restart", "0", "-q", "--tb=short"),
        *("-p", "no:cacheprovider", "tests/pure", "tests/devices", *CONTRACT, *more),
    ]
    with open(output, "w") as file:
        try:
            subprocess.run(
                command,
                cwd=REPOSITORY,
                # The environment may be that of another clone.
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=TESTS_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {TESTS_SECONDS} s"
    return closing_line(output.read_text("utf-8", errors="replace"))


def closing_line(text: str) -> str:
    """What pytest said at the end; libraries may have said more behind it."""
    found = [line for line in text.splitlines() if CLOSING_LINE.fullmatch(line)]
    return found[-1].strip("= ") if found else "pytest did not come to its end"


def installed(python: pathlib.Path) -> dict[str, str]:
    """The versions that are there: of what was asked for, the newest."""
    program = (
        "import json, platform, keras; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version(), "
        "'tensorflow': version('tensorflow-cpu'), 'keras': keras.__version__}))"
    )
    return json.loads(_output(str(python), "-c", program) or "{}")


def result_of(versions: Versions, folder: pathlib.Path, jobs: int) -> dict[str, str]:
    """One environment, made and tested; what stands in its row."""
    own = folder / str(versions)
    today = datetime.date.today().isoformat()
    is_nightly = versions.keras == NIGHTLY
    try:
        python = make_environment(versions, own)
        if is_nightly:
            install_nightly(own)
    except (RuntimeError, subprocess.SubprocessError) as error:
        asked = dataclasses.asdict(versions)
        return {**asked, "result": f"not run: {error}", "date": today}
    more = EXACTNESS if is_nightly else ()
    result = run_tests(python, own / "tests.txt", jobs, more)
    return {**installed(python), "result": result, "date": today}


def is_green(result: dict[str, str]) -> bool:
    said = result["result"]
    return "passed" in said and "failed" not in said and "error" not in said


def main(arguments=None) -> int:
    """0: all that were asked for are green."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    parser.add_argument("names", nargs="*", metavar="py3.11-tf2.21-keras3.12")
    default = pathlib.Path("~/.cache/tfdp-versions").expanduser()
    parser.add_argument("--folder", type=pathlib.Path, default=default)
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    known = versions_by_name()
    for name in options.names:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    results = options.folder / "results" / commit()
    rows = []
    for name in options.names or map(str, all_versions()):
        kept = results / f"{name}.json"
        if kept.exists() and name != NIGHTLY:
            result = json.loads(kept.read_text("utf-8"))
        elif options.list:
            print(name)
            continue
        else:
            began = time.monotonic()
            print(f"{name} ...", flush=True)
            result = result_of(known[name], options.folder, options.jobs)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(result) + "\n", "utf-8")
            print(f"  {(time.monotonic() - began) / 60:.1f} min", flush=True)
        rows.append(result)
        print(ROW.format(**result), flush=True)
    print("\n".join(["", *(ROW.format(**row) for row in rows)]))
    return 0 if all(map(is_green, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
