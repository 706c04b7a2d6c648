"""One training, measured and then planned, in a process of its own.

    python -m tests.planning.case measure '{"model": ..., ...}' result.json
    python -m tests.planning.case predict '{"model": ..., ...}' result.json

Measured is what a step adds to the resident memory (the peak of Linux since the step
began, less what there was before), and the variables and the batch, whose sizes are
known: the graph, Python and the libraries take memory too, and are not the training's.
Of several hosts, which are processes here, the first one measures; what its link keeps
for the next step is known as well.
"""

import ctypes
import dataclasses
import gc
import json
import os
import sys
import time

# In which order ops run changes from step to step: the peak of one in forty was a
# fifth above all others (two LSTMs at stage 3). So as many steps as there is time for.
STEPS_BEFORE, STEPS, SECONDS_OF_STEPS = 3, 8, 40


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    local_rows: int
    replicas: int
    stage: int
    remat: bool
    hosts: int = 1
    communication: str = "plain"


def communication_of(case):
    import tfdp

    return {
        "plain": tfdp.Communication(),
        "bfloat16": tfdp.Communication(wire_dtype="bfloat16"),
        "int8": tfdp.Communication(compression=tfdp.compression.Int8()),
        "powersgd": tfdp.Communication(
            compression=tfdp.compression.PowerSGD(start_step=0)
        ),
        "rows": tfdp.Communication(repeated_rows="sum"),
    }[case.communication]


def strategy_of(case):
    import tfdp

    options = {"shard": case.stage, "communication": communication_of(case)}
    if case.hosts > 1:
        return tfdp.MultiHostDataParallelStrategy(
            devices_per_host=case.replicas, **options
        )
    devices = tfdp.use_virtual_devices(case.replicas)
    return tfdp.DataParallelStrategy(devices, alone=True, **options)


def measure(case):
    import tensorflow as tf

    import tfdp
    from tests.planning.models import make_of
    from tfdp.cluster.machine import forget_peak, peak_bytes, resident_bytes

    build, rows_of = make_of(case.model)
    strategy = strategy_of(case)
    with strategy.scope():
        model = build()
        model.optimizer.build(model.trainable_variables)
    if case.remat:
        tfdp.remat(model)
    # Of all hosts together; each takes its part.
    batch = rows_of(case.local_rows * case.replicas * case.hosts)
    parts = tf.nest.flatten(batch)
    data = tf.data.Dataset.from_tensor_slices(batch).batch(len(parts[0])).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))
    model.make_train_function()
    for _ in range(STEPS_BEFORE):
        model.train_function(batches)
    added = []
    end = time.monotonic() + SECONDS_OF_STEPS
    while len(added) < STEPS or time.monotonic() < end:
        gc.collect()
        before = resident_bytes()
        forget_peak()
        model.train_function(batches)
        added.append(peak_bytes() - before)
    stored = _stored_bytes(model) + sum(part.nbytes for part in parts) // case.hosts
    stored += _kept_bytes(model, strategy)
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


def _kept_bytes(model, strategy):
    """What compression has left, and what a link keeps for the next step."""
    state = getattr(model.optimizer, "compression_state", None)
    left = [] if state is None else [copy.numpy() for copy in state.copies]
    size = sum(array.nbytes for array in left)
    if getattr(strategy, "link", None) is None:
        return size
    pool = strategy.link._pool._buffers
    # Weights that were gathered lie where the link has put them: once is enough.
    ranges = [(b.ctypes.data, b.ctypes.data + b.nbytes) for b in pool]
    for variable in model.trainable_variables:
        for copy in getattr(variable.value, "values", (variable.value,)):
            place = _address(copy)
            if any(start <= place < end for start, end in ranges):
                size -= copy.numpy().nbytes
    return size + sum(buffer.nbytes for buffer in pool)


def _address(variable):
    """Where the numbers of a variable lie."""
    import tensorflow as tf

    capsule = tf.experimental.dlpack.to_dlpack(variable.read_value())
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = (
        ctypes.c_void_p,
        [ctypes.py_object, ctypes.c_char_p],
    )
    found = pointer_of(capsule, b"dltensor")
    return ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))[0]


def predict(case):
    from tests.planning.models import make_of
    from tfdp.planning import plan

    build, rows_of = make_of(case.model)
    began = time.monotonic()
    found = plan(
        build,
        rows_of(case.local_rows * case.replicas * case.hosts),
        replicas=case.replicas,
        hosts=case.hosts,
        shard=case.stage,
        remat=case.remat,
        communication=communication_of(case),
    )
    return {
        "predicted": found.peak_bytes,
        "parts": dict(found.parts),
        "needed": found.needed_bytes,
        "is_known": found.is_known,
        "flops": found.flops,
        "seconds": time.monotonic() - began,
        "notes": list(found.notes),
    }


def main(what, case, path):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    case = Case(**json.loads(case))
    found = {"measure": measure, "predict": predict}[what](case)
    if os.environ.get("TFDP_RANK", "0") == "0":
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**dataclasses.asdict(case), **found}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
