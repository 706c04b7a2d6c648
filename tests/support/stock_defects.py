"""Runs the scenarios on the stock strategy, each in a process of its own.

    python -m tests.support.stock_defects NAME...

A line per scenario: {"name", "values"}, {"name", "error"} or {"name", "ending"} where
it hung or crashed. Strategies of one process share collective keys (defect D14), so one
scenario would spoil the next. Children are forked before TensorFlow's runtime starts:
they inherit the loaded libraries and cost a second each.
"""

import json
import multiprocessing
import sys

import tensorflow as tf

from tests.support import defects

TIMEOUT_SECONDS = 60


def run_one(name, connection):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 4
    )
    try:
        values = [array.tolist() for array in defects.run(name, "stock")]
        connection.send({"values": values})
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})


def outcome(name):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_one, args=(name, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if receiver.poll(TIMEOUT_SECONDS):
            return receiver.recv()
        return {"ending": f"hung for {TIMEOUT_SECONDS} seconds"}
    except EOFError:
        child.join()
        return {"ending": f"crashed with status {child.exitcode}"}
    finally:
        child.kill()
        child.join()


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        print(json.dumps({"name": scenario, **outcome(scenario)}), flush=True)
