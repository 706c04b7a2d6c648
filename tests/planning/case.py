"""One training, measured and then planned, in a process of its own.

`python -m tests.planning.case '{"model": ..., ...}' result.json`

Measured is what a step adds to the resident memory (the peak of Linux since the step
began, less what there was before), and the variables and the batch, whose sizes are
known: the graph, Python and the libraries take memory too, and are not the training's.
"""

import dataclasses
import gc
import json
import os
import sys
import time

STEPS_BEFORE, STEPS = 3, 8


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    local_rows: int
    replicas: int
    stage: int
    remat: bool


def measure(case):
    import tensorflow as tf

    import tfdp
    from tests.planning.models import make_of
    from tfdp.cluster.process_memory import forget_peak, peak_bytes, resident_bytes

    build, rows_of = make_of(case.model)
    devices = tfdp.use_virtual_devices(case.replicas)
    strategy = tfdp.DataParallelStrategy(devices, shard=case.stage, alone=True)
    with strategy.scope():
        model = build()
        model.optimizer.build(model.trainable_variables)
    if case.remat:
        tfdp.remat(model)
    batch = rows_of(case.local_rows * case.replicas)
    data = tf.data.Dataset.from_tensors(batch).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))
    model.make_train_function()
    for _ in range(STEPS_BEFORE):
        model.train_function(batches)
    added = []
    for _ in range(STEPS):
        gc.collect()
        before = resident_bytes()
        forget_peak()
        model.train_function(batches)
        added.append(peak_bytes() - before)
    stored = _stored_bytes(model) + sum(part.nbytes for part in batch)
    return {
        "stored": stored / case.replicas,
        "added": [one / case.replicas for one in added],
        "measured": (stored + max(added)) / case.replicas,
    }


def _stored_bytes(model):
    variables = {id(v): v for v in (*model.variables, *model.optimizer.variables)}
    return sum(
        part.numpy().nbytes
        for variable in variables.values()
        for part in getattr(variable.value, "values", (variable.value,))
    )


def predict(case):
    from tests.planning.models import make_of
    from tfdp.planning import plan

    build, rows_of = make_of(case.model)
    began = time.monotonic()
    found = plan(
        build,
        rows_of(case.local_rows * case.replicas),
        replicas=case.replicas,
        shard=case.stage,
        remat=case.remat,
    )
    return {
        "predicted": found.peak_bytes,
        "parts": dict(found.parts),
        "needed": found.needed_bytes,
        "flops": found.flops,
        "seconds": time.monotonic() - began,
        "notes": list(found.notes),
    }


def main(arguments):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    case = Case(**json.loads(arguments[0]))
    found = {**dataclasses.asdict(case), **measure(case)}
    gc.collect()
    found.update(predict(case))
    with open(arguments[1], "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
