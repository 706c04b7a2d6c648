"""A seed orders records on two hosts as on one; 0 is a seed as any other."""

import json

import numpy as np

import tfdp
from tests.support.fresh_python import run_program
from tests.support.workers import Workers

SEEDS = (0, 7)
# In a process of its own: nothing has set a global seed there.
ONE_HOST = """
import json, sys
from tests.support.seed_order import order_of
print("ORDERS", json.dumps({{seed: order_of({folder!r}, seed) for seed in {seeds!r}}}))
"""


def found_in(output, what="ORDERS"):
    (line,) = (line for line in output.splitlines() if line.startswith(f"{what} "))
    return json.loads(line.removeprefix(f"{what} "))


def test_two_hosts_read_in_the_order_of_one(tmp_path):
    tfdp.data.write_tfrecords({"x": np.arange(40)}, tmp_path, num_shards=2)
    program = ONE_HOST.format(folder=str(tmp_path), seeds=SEEDS)
    expected = found_in(run_program(program).stdout)
    arguments = ("tests.support.seed_order", tmp_path, ",".join(map(str, SEEDS)))
    with Workers(2, *arguments) as workers:
        outputs = workers.succeed()
    (first, first_unseeded), (second, second_unseeded) = map(found_in, outputs)
    assert first == second == expected
    assert expected["0"] != expected["7"]
    for order in expected.values():
        assert sorted(order) == sorted([*range(40)] * 2) and order[:40] != order[40:]
    # By tf.random.set_seed, which was given the same everywhere.
    for mine, others in zip(*(found_in(out, "DRAWS") for out in outputs), strict=True):
        assert not set(mine) & set(others)
    assert first_unseeded == second_unseeded != sorted(first_unseeded)
