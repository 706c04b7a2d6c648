"""Prints what `tfdp check`, `plan` and `tune` say of scripts, as a table.

python -m tests.support.script_table                     # README's and the examples
python -m tests.support.script_table one.py other.py
"""

import pathlib
import sys
import tempfile
import time

from tests.devices.test_docs import BLOCK
from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

COMMANDS = {
    "check": ["--steps", "2"],
    "plan": ["--replicas", "2", "--quick"],
    "tune": ["--replicas", "2", "--trials", "1", "--steps", "3"],
}
MOST_LETTERS = 110


def scripts(folder):
    """README's first program, and every script in examples/ and its folders."""
    program = folder / "README.py"
    text = (REPOSITORY / "README.md").read_text("utf-8")
    program.write_text(BLOCK.findall(text)[0], "utf-8")
    return [program, *sorted((REPOSITORY / "examples").rglob("*.py"))]


def outcome(command, script, folder):
    """The exit status, the seconds, and the line that says most."""
    begin = time.monotonic()
    words = ["-m", "tfdp", command, script, *COMMANDS[command]]
    done = run_python(*words, cwd=folder)
    seconds = time.monotonic() - begin
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    marks = ("HOLDS", "FAILS", "INCONCLUSIVE", "trial 0", "needs")
    said = [line for line in lines if any(mark in line for mark in marks)]
    if done.returncode == 2:
        refused = f"tfdp {command}:"
        said = [x for x in done.stderr.splitlines() if x.startswith(refused)] or said
    said = (said or ["?"])[0].replace(f"{REPOSITORY}/", "").replace("|", "/")
    return done.returncode, seconds, said[:MOST_LETTERS]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        given = [pathlib.Path(word).absolute() for word in sys.argv[1:]]
        print("| script | command | exit | seconds | says |")
        print("| --- | --- | --- | --- | --- |")
        for script in given or scripts(folder):
            for command in COMMANDS:
                code, seconds, said = outcome(command, script, folder)
                row = script.name, command, code, f"{seconds:.0f}", said
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
