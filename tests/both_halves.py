"""Runs both halves of the tier `test` at a time, for `make test`.

python -m tests.both_halves --jobs 2 --jobs-alone 1

processes  tests/processes and tests/network: they start processes of their own, which
           have deadlines and mostly wait for each other
devices    tests/pure and tests/devices: they share a process and wait for nobody

Alone the first leave a quarter of two cores idle. The second take what is left, at the
lowest priority, so that the deadlines of the first do not feel them. Where memory does
not hold both, they run in turn.
"""

import argparse
import re
import signal
import subprocess
import sys
import threading
import time

from tests.support import jobs

HALVES = {
    "processes": ("tests/processes", "tests/network"),
    "devices": ("tests/pure", "tests/devices"),
}
#: Of `nice`: where another process wants the same core, this one gets a 68th of it.
LOWEST_PRIORITY = "19"
LAST_LINES_SECONDS = 30.0
#: Of the rows of each half: earlier its slow rows mislead.
SAID_AFTER_PART = 0.2
#: Of pytest: how many rows there are, and a line of their outcomes, as far as it came.
COUNT = re.compile(r"workers? \[(\d+) items?\]")
OUTCOMES = re.compile(r"[.sxXFE]+")


def command_of(half: str, at_a_time: int) -> list[str]:
    """Pytest on a half; files stay whole, their tests share fixtures."""
    yielding = ["nice", "-n", LOWEST_PRIORITY] if half == "devices" else []
    return [
        *yielding,
        *(sys.executable, "-m", "pytest", *HALVES[half], "-n", str(at_a_time)),
        *("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"),
    ]


def started(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


class Estimate:
    """Says once how long the run will take, when a part of each half has ended.

    Args:
      names: of what runs; each prints how many rows it has, and an outcome of each.
    """

    def __init__(self, names):
        self._began = time.monotonic()
        self._rows = dict.fromkeys(names, 0)
        self._ended = dict.fromkeys(names, 0)
        self._is_said = False

    def note(self, name: str, line: str) -> None:
        """Looks at a line of `name`, once for each character it came by."""
        found = COUNT.search(line) if line.endswith("\n") else None
        if found is not None:
            self._rows[name] = int(found[1])
        elif OUTCOMES.fullmatch(line):
            self._ended[name] += 1
        if self._is_said or not all(self._rows.values()):
            return
        parts = {each: self._ended[each] / self._rows[each] for each in self._rows}
        least = min(parts.values())
        if least < SAID_AFTER_PART:
            return
        self._is_said = True
        seconds = time.monotonic() - self._began
        minutes = seconds / least * (1 - least) / 60
        said = ", ".join(f"{each} {part:.0%}" for each, part in parts.items())
        print(f"{seconds:.0f} s: {said}; about {minutes:.0f} more minutes", flush=True)


def pass_on(name: str, process: subprocess.Popen, estimate: Estimate) -> None:
    """Prints the lines of a process, each after its name, when they are whole."""
    line = ""
    while character := process.stdout.read(1):
        line += character
        estimate.note(name, line)
        if character == "\n":
            print(f"{name:<9} | {line}", end="", flush=True)
            line = ""


def run(commands: dict[str, list[str]]) -> bool:
    """Runs commands at a time, and ends them all when it is ended itself.

    Returns:
      Whether all have succeeded.
    """
    processes = {name: started(command) for name, command in commands.items()}
    estimate = Estimate(commands)
    readers = [
        threading.Thread(target=pass_on, args=(*each, estimate), daemon=True)
        for each in processes.items()
    ]
    for reader in readers:
        reader.start()
    try:
        codes = [process.wait() for process in processes.values()]
    finally:
        for process in processes.values():
            process.terminate()
            process.wait()
        for reader in readers:
            # Not for ever: what a test has left behind may hold the other end.
            reader.join(LAST_LINES_SECONDS)
    return not any(codes)


def main(arguments=None) -> int:
    """0: both halves have passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.both_halves")
    parser.add_argument("--jobs", type=int, required=True, metavar="N")
    parser.add_argument("--jobs-alone", type=int, required=True, metavar="N")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    at_a_time = {"processes": options.jobs_alone, "devices": options.jobs}
    commands = {half: command_of(half, at_a_time[half]) for half in HALVES}
    if jobs.memory_bytes() >= sum(at_a_time.values()) * jobs.JOB_BYTES:
        return int(not run(commands))
    passed = [run({half: command}) for half, command in commands.items()]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
