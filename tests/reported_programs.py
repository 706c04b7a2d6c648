"""Runs programs that people reported, kept in a folder, and prints which are right now.

    python -m tests.reported_programs FOLDER [WORD]

`WORD` picks the rows whose title contains it. A program that the folder lacks is said
to be missing. Exits with 1 if any was not right. `legacy_keras` needs tf_keras; what is
of Keras' nightly needs an environment of its own: run it there by hand.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 240.0
WITH_ARGUMENTS = """import runpy, sys
sys.argv = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SCRIPTS = Path(sys.executable).parent
TOLD = re.compile("Local(Mean|State)Warning")


@dataclasses.dataclass(frozen=True)
class Row:
    """A program, how it is started, and what is right.

    Args:
      right: tells by the exit code and the output; None: the last line is that of the
        program with the argument `one`, and tfdp warns of nothing.
      is_checked: whether `tfdp check` runs it.
    """

    program: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    workers: int = 0
    right: Callable[[int, str], bool] | None = lambda code, output: code == 0
    is_checked: bool = False

    @property
    def title(self) -> str:
        told = [f"{name}={value}" for name, value in self.variables.items()]
        if self.workers:
            told.append(f"({self.workers} workers)")
        check = ["check"] if self.is_checked else []
        return " ".join([*check, self.program, *self.arguments, *told])


def says(pattern: str, times: int = 1) -> Callable[[int, str], bool]:
    """Right: exit 0, and the output has `pattern` that often."""
    return lambda code, output: code == 0 and len(re.findall(pattern, output)) == times


def refuses(pattern: str) -> Callable[[int, str], bool]:
    """Right: an error that has `pattern`."""
    return lambda code, output: code != 0 and re.search(pattern, output) is not None


def rows(folder: str) -> list[Row]:
    """All rows; `folder` is an empty one for what programs save."""
    exact = ["sum", "kl", "advice", "svd"]
    found = [Row(f"rows_{name}") for name in exact]
    found += [
        Row(name)
        for name in (
            "gradients_output",
            "gradients_by_hand",
            "rate_from_rows",
            "right_vectorized_map",
            "right_adversarial_rows",
            "muon_compiled_twice",
        )
    ]
    found += [
        Row("unknown_is_silence", variables={"CAUSAL": causal, "DROPOUT": dropout})
        for causal in "01"
        for dropout in ("0.0", "0.1")
    ]
    found += [
        Row("library_distiller", ("tfdp2",), {"PART": part}, right=None)
        for part in ("student", "logits", "feature")
    ]
    found += [
        Row("advice_in_a_layer", ("tfdp2",), {"HOW": "rows"}, right=None),
        Row("legacy_keras", ("tfdp2",), right=refuses("Keras 2")),
        Row(
            "bfloat16_bias",
            ("tfdp",),
            right=lambda code, output: code == 1 and "(BiasAddGrad)" in output,
            is_checked=True,
        ),
        Row("idle_replicas", right=says("DeviceWarning: Batches of 8 rows")),
        Row("stateful_predict", right=says("ConfigurationError .*stateful=True", 2)),
        Row("ordered_tfds", right=says(r"False \[\[0, 1, 2, 3\]")),
        Row("webdataset_names", right=says("3 examples;")),
        Row("spawned_helpers", ("tfdp2",), right=quiet_end(1)),
        Row("spawned_helpers", workers=2, variables={"WHO": "all"}, right=quiet_end(2)),
    ]
    plans = [("quorum", 0, 15), ("backup", 2, 15), ("quorum", 2, 4), ("backup", 2, 4)]
    found += [
        Row("hosts_late_at_the_end", tuple(map(str, plan)), workers=3, right=trained(3))
        for plan in plans
    ]
    found += [
        Row("hosts_own_steps", ("none", "3"), workers=2, right=trained(2)),
        Row("hosts_own_steps", (folder, "1"), workers=2, right=trained(2)),
    ]
    return found


def trained(workers: int) -> Callable[[int, str], bool]:
    return says(r"TRAINED \d", workers)


def quiet_end(hosts: int) -> Callable[[int, str], bool]:
    """Right: each host ends, and none is told that its strategy was never used."""
    return lambda code, output: (
        says(r"\bend \d", hosts)(code, output) and "never used" not in output
    )


def run(
    folder: Path, row: Row, arguments: tuple[str, ...], saved: Path
) -> tuple[int, str]:
    """The exit code, 124 where it did not end, and what the program printed."""
    script = str(folder / f"{row.program}.py")
    command = [sys.executable, script, *arguments]
    if row.workers:
        launch = [str(SCRIPTS / "tfdp"), "launch", "--workers", str(row.workers)]
        command = [*launch, script, *arguments]
    elif row.is_checked:  # which passes no arguments on
        passes_on = saved / "with_arguments.py"
        passes_on.write_text(WITH_ARGUMENTS.format(arguments=[script, *arguments]))
        command = [str(SCRIPTS / "tfdp"), "check", str(passes_on)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | row.variables
    try:
        done = subprocess.run(
            command,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout


def is_right(folder: Path, row: Row, saved: Path) -> tuple[bool, str]:
    code, output = run(folder, row, row.arguments, saved)
    last = (output.strip().splitlines() or [""])[-1]
    if row.right is not None:
        return row.right(code, output), last
    _, one = run(folder, row, ("one",), saved)
    expected = (one.strip().splitlines() or [""])[-1]
    return code == 0 and last == expected and not TOLD.search(output), last


def main(folder: str, word: str = "") -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as saved:
        for row in rows(saved):
            if word not in row.title:
                continue
            if not (Path(folder) / f"{row.program}.py").exists():
                print(f"missing        {row.title}", flush=True)
                continue
            began = time.monotonic()
            right, last = is_right(Path(folder), row, Path(saved))
            wrong += not right
            state = "right" if right else "WRONG"
            print(f"{state} {time.monotonic() - began:6.1f} s {row.title}", flush=True)
            if not right:
                print(f"    {last[:300]}", flush=True)
    print(f"{wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
