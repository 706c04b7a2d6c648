"""Seconds that one host's fault costs the others: a table for docs/notes/faults.md.

    python -m tests.support.living_table FOLDER

Three hosts without TensorFlow (`tests.support.living_meetings`), a silence limit of
4 s, one fault each; the longest meeting of the others, and that without a fault.
"""

import pathlib
import sys

from tests.support.living_group import LivingGroup

FAULTS = {
    "none": "",
    "killed between meetings": "die=1@18",
    "worker 0 killed between meetings": "die=0@18",
    "killed in a meeting, half way": "die=1@20@after:_exchange",
    "worker 0 killed, before all hold": "die=0@20@before:_decide",
    "worker 0 killed, once decided": "die=0@20@after:_decide",
    "stopped": "stop=1@18",
    "worker 0 stopped": "stop=0@18",
    "worker 0 stopped in a meeting": "stop=0@20@before:_decide",
}


def main(folder):
    print("| what happens to one of three | longest meeting of the others |")
    print("| --- | ---: |")
    for number, (words, plan) in enumerate(FAULTS.items()):
        place = pathlib.Path(folder, str(number))
        place.mkdir(parents=True)
        plans = [p for p in (plan, "silence=4", "step_seconds=0.05") if p]
        module = "tests.support.living_meetings"
        with LivingGroup(3, module, place, 200, *plans, sleep_seconds=10.0) as group:
            group.run(seconds=240)
            who = int(plan.split("=")[1][0]) if plan else None
            seconds = [
                line["seconds"]
                for (rank, _), lines in group.lines().items()
                for line in lines[1:]
                if rank != who
            ]
        print(f"| {words} | {max(seconds):.2f} s |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
