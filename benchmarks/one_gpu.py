"""What tfdp does on a machine with one GPU, as a report of one page.

    python -m benchmarks.one_gpu --out DIR [--total-seconds S] [--only NAME ...]

Each group of rows is a process of its own with a deadline, so that a crash or a hang is
one line of the report. What is only right or wrong, and memory, run several at once;
what is timed runs alone. DIR holds `rows.json` and `report.md`, written anew with each
row, and what the processes printed, in `logs`. Without a GPU the groups rehearse on
logical CPUs, at tiny sizes, and the report says so. The exit status is 0 when all that
ran is right, and nothing was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import one_gpu_report as report

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROW, READY = "ROW ", "READY"
GRACE_SECONDS = 3.0
# On CPUs a rehearsal may share few cores.
REHEARSAL_FACTOR = 8


@dataclasses.dataclass(frozen=True)
class Group:
    """One process' worth of rows.

    Args:
      name: of the group.
      section: of the report, where its rows stand.
      seconds: its deadline on a GPU; of one that runs alone, first to make itself
        ready beside others, and again in its turn.
      words: what Python runs. A program that prints no rows is one row: its exit code.
      alone: whether nothing may run beside it, once it has its turn.
      environment: more variables.
    """

    name: str
    section: str
    seconds: float
    words: tuple[str, ...]
    alone: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def groups_of(folder: pathlib.Path, has_gpu: bool) -> list[Group]:
    """All groups, in the order in which they start."""

    def rows(
        file: str, name: str, section: str, seconds: float, alone: bool = False
    ) -> Group:
        words = ("-m", f"benchmarks.one_gpu_{file}", name, str(folder))
        hidden = planned if name == "plan" else ()
        return Group(name, section, seconds, words, alone, hidden)

    def program(name: str, seconds: float, *words: str, **environment: str) -> Group:
        return Group(
            name, "programs", seconds, words, environment=tuple(environment.items())
        )

    # Predicted without the GPU, for what is measured on it.
    real = ("ONE_GPU_REAL", str(int(has_gpu)))
    planned = (("CUDA_VISIBLE_DEVICES", ""), real)
    readme = _write_readme_examples(folder)
    stages = ("float32", "jit", "bfloat16", "float16")
    cases = ("none", "optimizer", "gradients", "parameters", "remat", "offload")
    answers = str(folder / "tfdp-selftest.json")
    twice = {"CUDA_VISIBLE_DEVICES": "0,0"} if has_gpu else {}
    return [
        rows("rows", "versions", "facts", 60),
        # What takes longest, or longest to make itself ready, starts first.
        rows("memory", "plan", "memory", 120),
        program("selftest", 200, "-m", "tfdp", "selftest", "--json", answers),
        rows("speed", "overhead-resnet50", "overhead", 120, alone=True),
        rows("speed", "overhead-bert", "overhead", 120, alone=True),
        rows("exact", "sums-2", "sums", 80),
        rows("exact", "sums-4", "sums", 120),
        *(rows("exact", f"stages-{name}", "stages", 110) for name in stages),
        *(rows("memory", f"memory-{case}", "memory", 80) for case in cases),
        program(
            "sockets",
            90,
            *("-m", "tfdp", "launch", "--workers", "2", readme["sockets"]),
            **twice,
        ),
        program("readme", 80, readme["readme"]),
        program("info", 70, "-m", "tfdp", "info"),
        program(
            "digits",
            90,
            *(str(ROOT / "examples" / "digits.py"), "--epochs", "5"),
            *("--out", str(folder / "digits")),
        ),
        rows("exact", "drift", "drift", 70),
        rows("exact", "drift-deterministic", "drift", 70),
        # TensorFlow's collectives may hang here: NCCL refuses two ranks on a card.
        rows("exact", "sums-tensorflow", "sums", 50),
        rows("speed", "halves-sums", "halves", 40, alone=True),
        rows("speed", "packing", "packing", 40, alone=True),
        rows("torch", "torch", "packing", 40, alone=True),
        rows("speed", "overhead-small", "overhead", 90, alone=True),
        rows("speed", "overhead-bert-jit", "overhead", 120, alone=True),
        rows("speed", "halves-steps", "halves", 120, alone=True),
        rows("memory", "timeline", "timeline", 60, alone=True),
    ]


def _write_readme_examples(folder: pathlib.Path) -> dict[str, str]:
    """README's example as it stands, and with sockets by name."""
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    example = next(block for block in blocks if "model.fit" in block)
    sockets = example.replace(
        "auto_strategy(cpu_devices=2)",
        'auto_strategy(communication=tfdp.Communication(engine="sockets"))',
    )
    paths = {}
    for name, code in (("readme", example), ("sockets", sockets)):
        path = folder / f"example_{name}.py"
        path.write_text(code, "utf-8")
        paths[name] = str(path)
    return paths


class Results:
    """The rows so far: printed, and on the disk, as soon as they are there.

    Args:
      folder: of `rows.json` and `report.md`.
      machine: see `report.machine_facts`.
    """

    def __init__(self, folder: pathlib.Path, machine: dict[str, Any]):
        self.folder, self.machine = folder, machine
        self.rows: list[dict[str, Any]] = []
        self._lock = threading.RLock()

    def add(self, group: Group, row: dict[str, Any]) -> None:
        """Takes in one row of `group`."""
        with self._lock:
            row = {"group": group.name, "section": group.section, **row}
            self.rows.append(row)
            try:
                print(report.line_of(row), flush=True)
                self.write()
            except Exception:  # else what comes after this row would be lost, too
                traceback.print_exc()

    def write(self, ended: str = "") -> None:
        """Writes both files; `ended`: how the run ended, where it was cut short."""
        with self._lock:
            whole = {"machine": self.machine, "ended": ended, "rows": self.rows}
            _replace(self.folder / "rows.json", json.dumps(whole, indent=1) + "\n")
            text = report.report_text(self.machine, self.rows, ended)
            _replace(self.folder / "report.md", text)


def _replace(path: pathlib.Path, text: str) -> None:
    half_written = path.with_name(f".writing-{path.name}")
    half_written.write_text(text, "utf-8")
    os.replace(half_written, path)


class Process:
    """A group that runs, in a session of its own."""

    def __init__(self, group: Group, results: Results, seconds: float):
        self.group, self.results = group, results
        self.seconds, self.start = seconds, time.monotonic()
        self.is_ready, self.has_turn = False, False
        self._rows, self._last = 0, ""
        logs = results.folder / "logs"
        logs.mkdir(exist_ok=True)
        name = re.sub(r"\W+", "-", group.name)
        self._log = open(logs / f"{name}.txt", "w", encoding="utf-8", errors="replace")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, *group.words],
            stdin=subprocess.PIPE if group.alone else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
                "KERAS_BACKEND": "tensorflow",
                # Several processes share the card.
                "TF_FORCE_GPU_ALLOW_GROWTH": "true",
                **dict(group.environment),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            with contextlib.suppress(ValueError):  # the log was closed
                self._log.write(line)
                self._log.flush()
            if line.startswith(ROW):
                with contextlib.suppress(ValueError):  # half a line of one that died
                    row = json.loads(line[len(ROW) :])
                    self._rows += 1
                    self.results.add(self.group, row)
            elif line.strip() == READY and self.group.alone:
                self.is_ready = True
            elif line.strip():
                self._last = line.strip()[-200:]

    @property
    def waits(self) -> bool:
        """Whether it is ready and waits for its turn."""
        return self.is_ready and not self.has_turn

    def give_turn(self) -> None:
        """Lets it go on, alone; its deadline begins anew."""
        self.has_turn, self.start = True, time.monotonic()
        pipe = self._process.stdin
        with contextlib.suppress(OSError):  # it died; `has_ended` says so
            if pipe is not None:
                pipe.write("\n")
                pipe.close()

    def has_ended(self, until: float) -> bool:
        """Whether it has ended, or had to be ended at its deadline; then its row.

        Args:
          until: by `time.monotonic`, when all have to be over.
        """
        code, now = self._process.poll(), time.monotonic()
        taken = now - self.start
        if code is None and now < until and (self.waits or taken < self.seconds):
            return False
        self.end()
        row = {"row": "", "seconds": round(taken, 1), "said": self._last}
        if code is None and self.waits:
            row |= {"state": "NOT RUN: the total time was over"}
        elif code is None:
            row |= {"state": f"TOO LONG: stopped after {taken:.0f} s"}
        elif code:
            row |= {"state": f"FAILED: exit code {code}"}
        elif self._rows:
            return True
        else:
            row |= {"state": "ok", "figures": {"exit code": code}}
        self.results.add(self.group, row)
        return True

    def end(self) -> None:
        """Ends it and all of its session."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        self._reader.join(GRACE_SECONDS)
        self._log.close()


def run_groups(
    groups: Sequence[Group], results: Results, until: float, at_once: int, factor: float
) -> None:
    """Runs them, `at_once` beside each other; those that run alone in their order.

    These make themselves ready beside the others, and have their turns when nothing
    else is left to run.

    Args:
      groups: what to run.
      results: takes in the rows.
      until: by `time.monotonic`, when all have to be over.
      at_once: processes.
      factor: of each deadline.
    """
    waiting = list(groups)
    running: list[Process] = []
    try:
        while waiting or running:
            running = [each for each in running if not each.has_ended(until)]
            is_over = time.monotonic() >= until
            while waiting and not is_over and _busy(running) < at_once:
                group = waiting.pop(0)
                running.append(Process(group, results, group.seconds * factor))
            if not waiting and running and not _busy(running):
                running[0].give_turn()
            if is_over:
                for group in waiting:
                    row = {"row": "", "state": "NOT RUN: the total time was over"}
                    results.add(group, {**row, "seconds": 0.0})
                waiting = []
            time.sleep(0.05)
    finally:
        for process in running:
            process.end()


def _busy(running: Sequence[Process]) -> int:
    return sum(not process.waits for process in running)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as an interrupt does: with a report."""

    def leave(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the groups; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="DIR")
    parser.add_argument("--total-seconds", type=float, metavar="S")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these groups")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    machine = report.machine_facts(ROOT, ["-m benchmarks.one_gpu", *sys.argv[1:]])
    has_gpu = bool(machine["gpus"])
    groups = groups_of(folder, has_gpu)
    names = [group.name for group in groups]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"no group {unknown[0]!r}; there are: {', '.join(names)}")
    chosen = [g for g in groups if not options.only or g.name in options.only]
    factor = 1 if has_gpu else REHEARSAL_FACTOR
    total = options.total_seconds or 600.0 * factor
    results, ended = Results(folder, machine), ""
    try:
        with signals_raise():
            at_once = max(1, (os.cpu_count() or 1) * 3 // 4)
            run_groups(chosen, results, begun + total, at_once, factor)
    except KeyboardInterrupt as error:
        ended = f"cut short by {error or 'an interrupt'}"
        done = {row["group"] for row in results.rows}
        missing = [group.name for group in chosen if group.name not in done]
        if missing:
            ended += f", without {', '.join(missing)}"
    machine["seconds"] = round(time.monotonic() - begun)
    results.write(ended)
    print(f"{machine['seconds']} s; {folder / 'report.md'}")
    right = all(row["state"] == "ok" for row in results.rows)
    return 0 if right and not ended else 1


if __name__ == "__main__":
    sys.exit(main())
