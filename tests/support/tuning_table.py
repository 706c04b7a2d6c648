"""The regrets of tuned settings: three models, two links, all buckets.

    python -m tests.support.tuning_table --folder out/tuning  # some 40 minutes
    python -m tests.support.tuning_table --folder out/tuning --show

Two processes, each on its half of the cores, over loopback and over a link of 1 Gbit/s
between network namespaces (needs root). Each grid is `tests.support.tuning_grid`: its
settings take turns, three rounds choose, and the others judge.
"""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys

from tests.support.tuning_regrets import regrets
from tfdp.cluster.addresses import LOOPBACK, free_port
from tfdp.cluster.job_key import JOB_KEY, make_job_key
from tfdp.launch.environment import cluster_variables, local_environment
from tfdp.tools.measuring.two_hosts import ADDRESSES, two_hosts

WORKERS = 2
LINKS = ("loopback", "1gbit")
# Subject -> rows of a global batch, and by link the steps that are timed in a round.
SUBJECTS = {
    "dense": (64, {"loopback": 30, "1gbit": 5}),
    "convolutional": (64, {"loopback": 30, "1gbit": 10}),
    "attention": (32, {"loopback": 10, "1gbit": 5}),
}
SECONDS_OF_GRID = 900
COLUMNS = "| {} | {} | {} | {} | {} | {} | {} | {} |"


def train(subject, link, path, rounds):
    """Fills `path`; ends with an error where a process does."""
    rows, steps = SUBJECTS[subject]
    words = (subject, str(rows), str(steps[link]), str(rounds), str(path))
    command = [sys.executable, "-m", "tests.support.tuning_grid", *words]
    cores = sorted(os.sched_getaffinity(0))
    key = make_job_key()
    with contextlib.ExitStack() as stack:
        hosts = None if link == "loopback" else stack.enter_context(two_hosts(link))
        address = LOOPBACK if hosts is None else ADDRESSES[0]
        coordinator = f"{address}:{free_port()}"
        processes = []
        for rank in range(WORKERS):
            variables = cluster_variables(WORKERS, rank, coordinator, 1)
            variables[JOB_KEY] = key
            environment = local_environment(
                {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
                variables,
                workers=WORKERS,
                rank=rank,
                cores=len(cores),
            )
            own = ",".join(map(str, cores[rank::WORKERS] or cores))
            pinned = ["taskset", "--cpu-list", own, *command]
            full = pinned if hosts is None else hosts.command(rank, *pinned)
            process = subprocess.Popen(full, env=environment)
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait(timeout=SECONDS_OF_GRID) for process in processes]
    if any(codes):
        raise SystemExit(f"{subject} over {link}: a process ended with {codes}")


def row_of(subject, link, path):
    found = regrets(path)
    speeds = ", ".join(
        f"{found[name]:.3g}"
        for name in ("defaults' steps/s", "chosen's steps/s", "best's steps/s")
    )
    lost = ", ".join(
        f"{100 * found[name]:.1f}%" for name in ("defaults' regret", "chosen's regret")
    )
    return COLUMNS.format(
        subject,
        link,
        f"{found['load']:.0f}",
        found["settings"],
        found["chosen"],
        speeds,
        lost,
        f"{100 * found['rounds differ by']:.0f}%",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS))
    parser.add_argument("--links", nargs="+", default=list(LINKS))
    # Three choose, and the others judge in two halves: nine left 8% to chance.
    parser.add_argument("--rounds", type=int, default=17)
    parser.add_argument("--show", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for link in options.links:
        for subject in options.subjects:
            path = options.folder.absolute() / f"{subject}-{link}.json"
            if not path.exists() and not options.show:
                train(subject, link, path, options.rounds)
            if path.exists():
                print(row_of(subject, link, path), flush=True)


if __name__ == "__main__":
    main()
