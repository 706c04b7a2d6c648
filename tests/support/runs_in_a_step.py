"""One of two workers that add several times in one step, in several runs.

`python -m tests.support.runs_in_a_step ENGINE`: runs side by side in one function, and
a function with a run in it that is called several times, and a function that replicas
call several times, beside a sum of their own.
"""

import sys

import numpy as np
import tensorflow as tf

import tfdp
from tests.support.replica_steps import distribute

RUNS, TURNS, ELEMENTS = 3, 30, 20_000


def main(engine):
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(engine=engine, timeout_seconds=120)
    )

    def total(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", x * tf.ones([ELEMENTS]))[:2]

    def run(x):
        return strategy.experimental_local_results(strategy.run(total, (x,)))

    called, within = tf.function(run), tf.function(total)

    def mixed(*given):
        first, *others = given
        return [total(first), *(within(x) for x in others)]

    def run_mixed(given):
        results = strategy.run(mixed, given)
        return [strategy.experimental_local_results(result) for result in results]

    ways = {
        "side by side": tf.function(lambda given: [run(x) for x in given]),
        "called": tf.function(lambda given: [called(x) for x in given]),
        "within": tf.function(run_mixed),
    }
    of_each = [10.0**rank for rank in range(strategy.num_replicas_in_sync)]
    given = [
        distribute(strategy, [scale * own for own in of_each])
        for scale in range(1, RUNS + 1)
    ]
    of_one = sum(of_each)
    for name, step in ways.items():
        wrong = 0
        for _ in range(TURNS):
            found = np.array(step(given))  # [run, replica, 2]
            wanted = of_one * np.arange(1, RUNS + 1)[:, None, None]
            wrong += not np.array_equal(found, np.broadcast_to(wanted, found.shape))
        print(f"{name}: {wrong} of {TURNS} wrong", flush=True)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
