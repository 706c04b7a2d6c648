"""One thread more than cores or replicas, where a worker may still set the number."""

import os

import pytest

from tests.support.fresh_python import run_program

PROGRAM = """
import tensorflow as tf
from tfdp.strategies.devices import add_waiting_thread, use_virtual_devices
{before}
add_waiting_thread()
print(tf.config.threading.get_inter_op_parallelism_threads())
"""
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    "before, expected",
    [
        ("", CORES + 1),
        ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", 2),
        (f"use_virtual_devices({CORES + 2})", CORES + 3),
        ("use_virtual_devices(1)", CORES + 1),
        ("tf.config.threading.set_inter_op_parallelism_threads(7)", 7),
        ("import os; os.environ['TF_NUM_INTEROP_THREADS'] = '5'", 0),
        ("tf.zeros([1])", 0),  # too late
    ],
)
def test_only_an_open_number_is_set(before, expected):
    done = run_program(PROGRAM.format(before=before))
    assert done.stdout.strip() == str(expected), done.stderr
