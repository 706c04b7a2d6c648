"""Hosts that meet, die and come back, without TensorFlow: every meeting, noted.

    python -m tests.support.living_meetings FOLDER UPDATES [WHAT=...]

Under TFDP_* variables. A host adds (rank + 1) / 8 per update to its weights, in binary
fractions, and they meet after every fourth: what comes out is exact. With `until_all=1`
they train on, however slow the machine is, until all are present again. See
`tests.support.living_faults` for what happens meanwhile.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import numpy as np

from tests.support.living_faults import Faults
from tfdp.hosts.elastic_group import LEFT_OUT, MET, ElasticHosts

EVERY = 4
SIZE = 1000


def main(folder, updates, *plans):
    plans = dict(plan.split("=", 1) for plan in plans)
    folder, rank = pathlib.Path(folder), int(os.environ["TFDP_RANK"])
    faults = Faults(folder, rank, plans)
    hosts = ElasticHosts(
        rank,
        int(os.environ["TFDP_WORKERS"]),
        os.environ["TFDP_COORDINATOR"],
        timeout_seconds=float(plans.get("timeout", 60)),
        silence_seconds=float(plans.get("silence", 2)),
        min_hosts=int(plans.get("min_hosts", 1)),
        secret=b"key",
        say=lambda line: print(line, flush=True),
    )
    weights, update = np.full(SIZE, float(rank)), 0
    exchanges, workers = True, int(os.environ["TFDP_WORKERS"])
    until_all = bool(plans.get("until_all"))
    full = 0  # agreements in a row after which all are present
    file = (folder / f"{rank}.{os.getpid()}.jsonl").open("a")
    while update < int(updates) or (until_all and (full < 2 or update % EVERY)):
        if exchanges:
            state = hosts.exchange_state([weights, np.array(update)])
            (weights, update), exchanges = state, False
            update = int(update)
            full = max(full, 1) if len(hosts.present) == workers else 0
        faults.before_update(update + 1)
        time.sleep(float(plans.get("step_seconds", 0.02)))
        update += 1
        weights = weights + (rank + 1) / 8
        if update % EVERY == 0:
            start = time.monotonic()
            brought = weights[0]
            (weights,), outcome = hosts.meet(update, [weights])
            exchanges = outcome != MET
            full = full + 1 if len(hosts.present) == workers else 0
            line = {
                "time": time.time(),
                "seconds": time.monotonic() - start,
                "update": update,
                "brought": brought,
                "left_out": outcome == LEFT_OUT,
                "hash": hashlib.sha256(weights.tobytes()).hexdigest(),
                "mean": weights[0],
                "epoch": hosts.epoch,
                "present": hosts.present,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
    hosts.close()
    print("ENDED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
