"""Runs `tfdp launch` with small scripts, and a program that stands in for ssh."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS

# Prepended to every script. `note` leaves a file named for a fact, `wait_for` waits for
# one, and nothing waits for ever.
PRELUDE = """
import os, pathlib, signal, socket, subprocess, sys, time
RANK, WORKERS = int(os.environ["TFDP_RANK"]), int(os.environ["TFDP_WORKERS"])
HOST, PORT = os.environ["TFDP_COORDINATOR"].split(":")
FOLDER = pathlib.Path(__file__).parent

def note(name, text=""):
    unfinished = FOLDER / f"{name}.unfinished"
    unfinished.write_text(str(text))
    unfinished.rename(FOLDER / name)

def wait_for(*names):
    for _ in range(6000):
        if all((FOLDER / name).exists() for name in names):
            return
        time.sleep(0.02)
    sys.exit(99)
"""
# The launcher starts in about 0.3 s; the machine may be busy with something else. What
# is waited for in vain would take 400 s and more.
SLACK_SECONDS = 120.0


def listen_to_signals():
    """Whoever runs the tests may ignore signals (nohup, a background job)."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Launches:
    """Starts `tfdp launch OPTIONS script.py`; kills what is left at the end.

    Args:
      folder: for the script and what it notes; the launchers' own files go into `own`.
      patches: lines of Python that are run in the launcher before it starts.
    """

    def __init__(self, folder, patches=()):
        self.folder = folder
        self.own = folder / "own"
        self._patches = patches
        self._started = []

    def start(self, script, *options, arguments=(), path=None, variables=None):
        file = self.folder / "script.py"
        file.write_text(PRELUDE + script, "utf-8")
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TFDP_", "SLURM_", "OMP_", "TF_NUM_"))
        }
        self.own.mkdir(exist_ok=True)
        environment |= {"TMPDIR": str(self.own), **(variables or {})}
        if path is not None:
            environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
        lines = [
            "import sys",
            "from tfdp.tools.commands.cli import main",
            *self._patches,
            "sys.exit(main(sys.argv[1:]))",
        ]
        program = ["-c", "\n".join(lines)] if self._patches else ["-m", "tfdp"]
        words = [*program, "launch", *options, file, *arguments]
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=listen_to_signals,
        )
        self._started.append(process)
        return process

    def run(self, *words, **options):
        """To its end: (exit code, stdout lines, stderr lines, seconds)."""
        start_seconds = time.monotonic()
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=LONGEST_SECONDS)
        seconds = time.monotonic() - start_seconds
        return process.returncode, out.splitlines(), err.splitlines(), seconds

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
            process.stderr.close()


def lines_until(process, text):
    """What a launcher says on stderr, up to a line that holds `text`."""
    timer = threading.Timer(SLACK_SECONDS, process.kill)
    timer.start()
    lines = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if text in line:
                return lines
    finally:
        timer.cancel()
    raise AssertionError(f"no line holds {text!r}: {lines}")


def wait_until(condition, seconds=SLACK_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid):
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state[0] not in "ZX"


def pids(folder, *names):
    assert wait_until(lambda: all((folder / name).exists() for name in names))
    return [int((folder / name).read_text()) for name in names]


def program(folder, name, text):
    """An executable that stands in for one of the system's."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text, "utf-8")
    path.chmod(0o755)
    return path


# Stands in for ssh: notes its arguments and runs the last of them, the command, here.
# As with sshd the command is no part of this process group, and its input is a pipe
# that ends with the connection. A file `down-HOST` makes a host unreachable.
SSH = """#!{python}
import os, pathlib, subprocess, sys, threading
if pathlib.Path("{folder}", "down-" + sys.argv[-2]).exists():
    print("ssh: connect to host", sys.argv[-2], "port 22: No route", file=sys.stderr)
    sys.exit(255)
pathlib.Path("{folder}", f"ssh-{{os.getpid()}}").write_text(" ".join(sys.argv[1:]))
command = subprocess.Popen(
    ["sh", "-c", sys.argv[-1]], stdin=subprocess.PIPE, start_new_session=True
)
def pass_on_input():
    while data := os.read(0, 1 << 16):
        command.stdin.write(data)
        command.stdin.flush()
    command.stdin.close()
threading.Thread(target=pass_on_input, daemon=True).start()
os._exit(command.wait())
"""


def ssh(folder):
    program(folder / "bin", "ssh", SSH.format(python=sys.executable, folder=folder))
    return folder / "bin"
