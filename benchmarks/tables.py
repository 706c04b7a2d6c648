"""Measures training with large embedding tables: in parts, gathered, and whole.

A model like DLRM (Naumov et al. 2019, arXiv 1906.00091): ten tables, and a few dense
layers. "parts" is `shard="parameters"`, "gathered" the same with lookups of a subclass,
which gather each table, "whole" a copy of all tables on each replica. Each figure comes
from a process of its own; they take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from typing import Any

from benchmarks.memory import ENVIRONMENT
from benchmarks.shared import (
    ask_in_turn,
    least_to_most,
    make_parser,
    needs_proc,
    run_script,
    write_report,
)
from tfdp.cluster.machine import forget_peak, peak_bytes, resident_bytes
from tfdp.tools.processes.children import ask_child

ARMS = ("parts", "gathered", "whole")
OPTIMIZERS = ("SGD", "Adagrad")
# The first steps of an epoch, which also wait for its input.
FIRST = 2
# Of the process that tells the peak: allocators without pools are slow.
PEAK_STEPS = 4


@dataclasses.dataclass(frozen=True)
class TableRequest:
    """A training by `fit`.

    Args:
      arm: "parts", "gathered" or "whole".
      optimizer: a class of Keras'.
      tables: how many.
      words: of each table.
      width: of a row.
      rows: samples of a global batch; each has a word of each table.
      steps: of an epoch.
      replicas: logical CPUs, of all processes.
      processes: that share the replicas.
    """

    arm: str
    optimizer: str
    tables: int = 10
    words: int = 1_000_000
    width: int = 16
    rows: int = 1024
    steps: int = 20
    replicas: int = 2
    processes: int = 1

    @property
    def of_process(self) -> int:
        """Replicas of a process."""
        return self.replicas // self.processes


def make_model(request: TableRequest) -> Any:
    """The model, compiled, in the scope of a strategy."""
    import keras
    from keras.layers import Concatenate, Dense, Embedding

    class Gathered(Embedding):
        """Gathers its table, because it has a call of its own."""

        def call(self, inputs: Any) -> Any:
            return super().call(inputs)

    kind = Gathered if request.arm == "gathered" else Embedding
    keras.utils.set_random_seed(0)
    numbers = keras.Input((13,))
    words = [keras.Input((), dtype="int32") for _ in range(request.tables)]
    rows = [kind(request.words, request.width)(each) for each in words]
    x = Concatenate()([*rows, Dense(request.width, "relu")(numbers)])
    x = Dense(1)(Dense(64, "relu")(x))
    model = keras.Model([*words, numbers], x)
    optimizer = getattr(keras.optimizers, request.optimizer)(0.01)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def shard_of(request: TableRequest) -> str:
    """The strategy's `shard=` of an arm."""
    return "none" if request.arm == "whole" else "parameters"


def draw(request: TableRequest, steps: int) -> tuple[list[Any], Any]:
    """Inputs and targets of as many steps."""
    import numpy as np

    drawn = np.random.default_rng(0)
    samples = request.rows * steps
    x = [
        drawn.integers(0, request.words, samples).astype("int32")
        for _ in range(request.tables)
    ]
    x.append(drawn.normal(size=(samples, 13)).astype("float32"))
    return x, drawn.normal(size=(samples, 1)).astype("float32")


def measure(request: TableRequest) -> dict[str, float]:
    """Seconds of a step, bytes of tables that all replicas send in it, and bytes that a
    replica holds at rest, and at the peak of a step above the process without a
    model."""
    import keras
    import numpy as np

    import tfdp
    from tfdp.exchange.traffic import TrafficMeter

    tfdp.use_virtual_devices(request.of_process)
    if request.processes == 1:
        strategy = tfdp.DataParallelStrategy(shard=shard_of(request), alone=True)
    else:
        strategy = tfdp.MultiHostDataParallelStrategy(shard=shard_of(request))
    before = resident_bytes()
    with strategy.scope():
        model = make_model(request)
    x, y = draw(request, request.steps)
    marks: list[tuple[float, int]] = []
    meter, transport = TrafficMeter(), strategy.extended.reducer.transport
    transport.traffic.meters.add(meter)

    def mark() -> None:
        sent = meter.sent_bytes
        if request.processes > 1:  # the other ones send as much
            sent = request.processes * (transport.bytes_between_hosts or 0)
        marks.append((time.perf_counter(), sent or 0))

    class Marks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == FIRST - 1:
                forget_peak()
                mark()

    options = {"batch_size": request.rows, "shuffle": False, "verbose": 0}
    fitted = model.fit(x, y, epochs=2, callbacks=[Marks()], **options)
    mark()
    peak = peak_bytes() - before
    (begin, sent_before), (end, sent) = marks[-2:]
    if not np.isfinite(fitted.history["loss"][-1]):
        raise ValueError("The loss is not finite: the figures would mean nothing.")
    dense = [w for w in model.weights if w.shape[0] != request.words]
    of_dense = (
        2 * (request.replicas - 1) * 4 * sum(int(np.prod(w.shape)) for w in dense)
    )
    held = 0
    for variable in (*model.weights, *model.optimizer.variables):
        first = getattr(variable.value, "values", [variable.value])[0]
        held += int(np.prod(first.shape)) * first.dtype.size
    part = 1 if request.arm == "whole" else request.replicas
    away = (request.replicas - 1) / request.replicas
    once, each = 0, len(y) * request.tables
    for words in x[:-1]:
        of_replicas = words.reshape(request.steps, request.replicas, -1)
        once += sum(len(np.unique(own)) for step in of_replicas for own in step)
    is_linear = request.optimizer == "SGD"
    row = request.width * 4
    touched = away * (once * (4 + row) + (once if is_linear else each) * (4 + row))
    return {
        "seconds": (end - begin) / (request.steps - FIRST),
        "bytes": (sent - sent_before) / (request.steps - FIRST) - of_dense,
        "touched_bytes": touched / request.steps,
        "held_bytes": held,
        "peak_bytes": peak / request.of_process,
        "expected_bytes": request.tables * request.words * row / part,
    }


def plan(request: TableRequest) -> float:
    """The peak of a replica's step, as `tfdp plan` predicts it."""
    import tfdp.planning

    planned = tfdp.planning.plan(
        lambda: make_model(request),
        draw(request, 1),
        replicas=request.of_process,
        hosts=request.processes,
        shard=shard_of(request),
    )
    return float(planned.peak_bytes)


def run(options: argparse.Namespace) -> int:
    """Measures all arms in turn, and prints them side by side."""
    needs_proc()
    small = {"words": 1000, "rows": 64, "steps": 4} if options.quick else {}
    if options.words:
        small["words"] = options.words
    small["processes"] = options.processes
    requests = [TableRequest(arm, name, **small) for name in OPTIMIZERS for arm in ARMS]
    peaks: dict[TableRequest, dict[str, float]] = {}

    def ask(request: TableRequest) -> dict[str, float]:
        figures = _ask(request, options.timeout_seconds)
        if request not in peaks:  # once is enough
            peaks[request] = _peaks(request, options.timeout_seconds)
        return figures | peaks[request]

    found, load, failed = ask_in_turn(requests, options.repeats, ask)
    for request in requests:
        if not found[request]:
            continue
        seconds = [one["seconds"] for one in found[request]]
        first = found[request][0]
        peak, planned = first["peak_bytes"], first["planned_bytes"]
        print(
            f"{request.optimizer} {request.arm}: "
            f"{least_to_most(seconds, '.4f', ' s')} a step, {first['bytes']:,.0f} "
            f"bytes of tables sent (rows of the words: {first['touched_bytes']:,.0f}), "
            f"{first['held_bytes']:,.0f} bytes at rest on a replica (of tables "
            f"{first['expected_bytes']:,.0f}), {peak:,.0f} at the peak of a step "
            f"(planned {planned:,.0f}: {peak / planned:.2f})"
        )
    for name in OPTIMIZERS:
        of_name = [request for request in requests if request.optimizer == name]
        parts, *others = ([one["seconds"] for one in found[r]] for r in of_name)
        for arm, other in zip(ARMS[1:], others, strict=True):
            if parts and other:
                ratios = [b / a for a, b in zip(parts, other, strict=False)]
                print(f"{name}: steps/s / {arm}: {least_to_most(ratios, '.2f')}")
    print(f"\n{load}", flush=True)
    rows = [{**dataclasses.asdict(r), "found": of} for r, of in found.items()]
    write_report(options.json, "tables", loads=load.figures, rows=rows)
    return failed


def _ask(request: TableRequest, deadline: float, **variables: str) -> dict[str, float]:
    launcher = ["-m", "tfdp", "launch", "--workers", str(request.processes)]
    found: dict[str, float] = ask_child(
        "benchmarks.tables",
        dataclasses.asdict(request),
        deadline,
        launcher if request.processes > 1 else (),
        **variables,
    )
    return found


def _peaks(request: TableRequest, deadline: float) -> dict[str, float]:
    """The peak of a replica's step where what is freed returns to the system, and
    the plan's."""
    fewer = dataclasses.replace(request, steps=PEAK_STEPS)
    peak = _ask(fewer, deadline, **ENVIRONMENT)["peak_bytes"]
    asked = {"plan": dataclasses.asdict(request)}
    planned = ask_child("benchmarks.tables", asked, deadline)
    return {"peak_bytes": peak, "planned_bytes": planned}


def find(asked: dict[str, Any]) -> Any:
    """The figures that a worker process measures, or the plan of them."""
    if "plan" in asked:
        return plan(TableRequest(**asked["plan"]))
    figures = measure(TableRequest(**asked))
    return figures if int(os.environ.get("TFDP_RANK", 0)) == 0 else None


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--words", type=int, help="of each table, by default 1000000")
    parser.add_argument(
        "--processes", type=int, choices=(1, 2), default=1, help="of the two replicas"
    )
    run_script(parser, run, find)
