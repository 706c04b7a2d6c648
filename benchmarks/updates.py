"""Measures an optimizer's update alone: plain Keras, weight by weight, and together.

"keras" is Keras without a strategy, "each" tfdp that updates weight by weight, "packed"
tfdp as it is: small weights are updated together. "fused" is
`tfdp.optimizers.fused`: XLA compiles the updates. All arms update the same weights by
the same gradients, in one process, in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.shared import (
    ask_in_turn,
    least_to_most,
    make_parser,
    run_script,
    write_report,
)
from tfdp.tools.processes.children import ask_child

ARMS = ("keras", "each", "packed", "fused")
SUBJECTS = ("small", "resnet50")


@dataclasses.dataclass(frozen=True)
class UpdateRequest:
    """Updates to be timed.

    Args:
      subject: "small" (450 weights of 1,400 numbers), or "resnet50" (214 weights).
      optimizer: a class of Keras'.
      replicas: logical CPUs.
      rounds: turns of each arm.
      updates: in a turn.
    """

    subject: str
    optimizer: str = "Adam"
    replicas: int = 1
    rounds: int = 7
    updates: int = 4


def shapes_of(subject: str) -> list[tuple[int, ...]]:
    """The shapes of the weights of a subject."""
    import keras

    if subject == "small":
        return [(35, 40) if place % 2 else (1400,) for place in range(450)]
    model = keras.applications.ResNet50(weights=None)
    return [tuple(weight.shape) for weight in model.trainable_variables]


def _update_of(request: UpdateRequest, arm: str, shapes: Sequence[Any]) -> Callable:
    """A function that makes one update."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp
    from tfdp.step import packed_updates

    is_plain = arm == "keras"
    strategy = (
        tf.distribute.get_strategy()
        if is_plain
        else tfdp.DataParallelStrategy(alone=True)
    )
    drawn = np.random.default_rng(0)
    gradients = [tf.constant(drawn.normal(size=s).astype("float32")) for s in shapes]
    with strategy.scope():
        zeros = [np.zeros(shape, "float32") for shape in shapes]
        weights = [keras.Variable(value) for value in zeros]
        optimizer = getattr(keras.optimizers, request.optimizer)(1e-3)
        if arm == "fused":
            tfdp.optimizers.fused(optimizer)
        optimizer.build(weights)

    @tf.function(autograph=False)
    def update() -> None:
        strategy.run(lambda: optimizer.apply(gradients, weights))

    @tf.function(autograph=False)
    def update_plainly() -> None:
        optimizer.apply(gradients, weights)

    chosen = update_plainly if is_plain else update
    before = packed_updates.LARGEST_BYTES
    packed_updates.LARGEST_BYTES = 0 if arm == "each" else before
    start = time.perf_counter()
    chosen()
    chosen.first_seconds = time.perf_counter() - start  # type: ignore[attr-defined]
    packed_updates.LARGEST_BYTES = before
    return chosen


def measure(request: UpdateRequest) -> dict[str, dict[str, Any]]:
    """Seconds of the first update, and of one update in each round, by arm."""
    import tfdp

    tfdp.use_virtual_devices(request.replicas)
    shapes = shapes_of(request.subject)
    updates = {arm: _update_of(request, arm, shapes) for arm in ARMS}
    found: dict[str, dict[str, Any]] = {
        arm: {"first": update.first_seconds, "each": []}  # type: ignore[attr-defined]
        for arm, update in updates.items()
    }
    for _ in range(request.rounds):
        for arm, update in updates.items():
            start = time.perf_counter()
            for _ in range(request.updates):
                update()
            seconds = (time.perf_counter() - start) / request.updates
            found[arm]["each"].append(seconds)
    return found


def run(options: argparse.Namespace) -> int:
    """Measures all subjects, and prints the arms side by side."""
    subjects = SUBJECTS[:1] if options.quick else SUBJECTS
    rounds = 1 if options.quick else UpdateRequest.rounds
    requests = [
        UpdateRequest(subject, options.optimizer, rounds=rounds) for subject in subjects
    ]

    def ask(request: UpdateRequest) -> Any:
        asked, deadline = dataclasses.asdict(request), options.timeout_seconds
        return ask_child("benchmarks.updates", asked, deadline)

    found, load, failed = ask_in_turn(requests, options.repeats, ask)
    for request, results in found.items():
        for arm in ARMS if results else ():
            firsts = [one[arm]["first"] for one in results]
            ratios, times = [], []
            for one in results:
                times += [1000 * seconds for seconds in one[arm]["each"]]
                pairs = zip(one[arm]["each"], one["keras"]["each"], strict=True)
                ratios += [own / other for own, other in pairs]
            print(
                f"{request.optimizer}, {request.subject}, {arm}: "
                f"{least_to_most(times, '.1f', ' ms')}, / keras "
                f"{least_to_most(ratios, '.2f')}; the first "
                f"{least_to_most(firsts, '.1f', ' s')}"
            )
    print(f"\n{load}", flush=True)
    rows = [{**dataclasses.asdict(r), "found": of} for r, of in found.items()]
    write_report(options.json, "updates", loads=load.figures, rows=rows)
    return failed


def find(asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures that a worker process measures."""
    return measure(UpdateRequest(**asked))


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=2)
    parser.add_argument("--optimizer", default="Adam", help="of Keras' (default: Adam)")
    run_script(parser, run, find)
