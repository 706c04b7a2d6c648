"""Draws Keras programs and compares each with one device on the whole batch.

python -m tests.generator --minutes 60 --seed 1 --folder out
python -m tests.generator --from-file out/finding_1_0123456789.py
"""

import argparse
import random
import runpy
import sys

from tests.generator.child import Child
from tests.generator.hosts import HostsChild
from tests.generator.known import KNOWN
from tests.generator.search import Search


def main(arguments=None):
    """0: nothing found; 1: something."""
    parser = argparse.ArgumentParser(prog="python -m tests.generator")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="of the first round; else drawn")
    parser.add_argument("--folder", help="where findings are written")
    parser.add_argument("--reduce-seconds", type=float, default=240.0)
    parser.add_argument(
        "--with-known",
        nargs="*",
        default=(),
        metavar="WORDS",
        help="draws what known.py leaves out, too: lines that hold these words",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        choices=(1, 2),
        metavar="DEVICES",
        help="each program on two processes of so many devices",
    )
    parser.add_argument(
        "--waits",
        action="store_true",
        help="with --hosts: exchanges begin late at random",
    )
    parser.add_argument("--from-file", help="runs the program of a finding's file")
    chosen = parser.parse_args(arguments)
    if chosen.waits and not chosen.hosts:
        parser.error("--waits: exchanges of several hosts; add --hosts 1 or 2")
    plant = "waits" if chosen.waits else None
    if chosen.from_file:
        program = runpy.run_path(chosen.from_file)["program"]
        return replay(program, devices_of_hosts=chosen.hosts, plant=plant)
    seed = random.randrange(10**6) if chosen.seed is None else chosen.seed
    switched_on = [
        line for line in KNOWN if any(words in line for words in chosen.with_known)
    ]
    search = Search(
        chosen.minutes,
        seed,
        chosen.folder,
        chosen.reduce_seconds,
        switched_on,
        child=HostsChild(chosen.hosts, plant_on_all=plant) if chosen.hosts else None,
    )
    findings = search.run()
    print(search.summary())
    return 1 if findings else 0


def replay(program, devices_of_hosts=None, plant=None):
    """Runs one program in a process of its own, or two; prints the verdict."""
    child = (
        HostsChild(devices_of_hosts, plant_on_all=plant)
        if devices_of_hosts
        else Child()
    )
    verdict = child.judge(program)
    child.close()
    print(program)
    print(verdict.kind, verdict.signature)
    print(verdict.text)
    return 1 if verdict.is_finding else 0


if __name__ == "__main__":
    sys.exit(main())
