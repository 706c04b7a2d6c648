"""`ReplicaCheck`: detects a replica with other weights than the rest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdp.callbacks.other_callbacks import Logs
from tfdp.callbacks.step_count import StepCount, is_due
from tfdp.checks import check_one_of, check_whole
from tfdp.errors import CollectiveError, ReplicaDriftError, ReplicaDriftWarning
from tfdp.plan.drift import Drift, Holding, find_drifts
from tfdp.step.replicated_state import replicated_state_of
from tfdp.strategies.gather_from_hosts import (
    first_rank_of,
    gather_from_hosts,
    places_of,
    refuse_strategy,
)
from tfdp.variables.bit_hash import bit_hash

REACTIONS = ("raise", "warn")
# Variables that an error names; `drifts` has all.
MOST_NAMED = 5


class ReplicaCheck(keras.callbacks.Callback):
    """Compares replicated state over all replicas of all hosts, bit for bit.

    Replicas that start equal and update equally stay equal, but training does not
    verify it. After a flipped bit in a device's memory, a driver that computes
    differently on one machine, or an assignment on one replica, the loss still falls.
    Every `every_steps` steps, and when training ends, each replica hashes the bits of
    its weights, optimizer state and other replicated state
    (`tfdp.step.replicated_state`), and the hashes are compared. If more than half of
    the holders of a variable agree, the others are named, by rank, device and worker;
    else all.

    -0.0 and 0.0 differ, and so do two NaN with different bits. With `shard=` only what
    is replicated is compared; with shard_group="host" also the shards, across hosts.
    With `sync=` it compares the outer weights, and the local ones within a group that
    steps together. With gradient accumulation, buffers are compared right after an
    update only. Metrics, accumulated gradients and random states are not compared.

    Args:
      every_steps: steps between comparisons, at least 1. With `steps_per_execution` it
        compares after the execution in which it is due.
      on_drift: "raise", or "warn": a `ReplicaDriftWarning` once per variable and
        replica, and training continues.

    Raises:
      ConfigurationError: an argument is not as above; when training starts: under a
        strategy of several replicas that is not tfdp's or of a TPU.
      ReplicaDriftError: on all hosts, when something drifted; `drifts` holds all of it.

    Cost: reads the compared state on its device: some 3 ns of a CPU core per 4 bytes
    (21 million parameters with Adam on two replicas: 0.34 s, the first time 0.9 s), up
    to a millisecond per variable, and some 30 bytes to each other host per variable and
    replica. No cost in other steps or on one replica.

    ```python
    import keras
    import numpy as np
    import tfdp

    tfdp.use_virtual_devices(2)
    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.ones((16, 4), "float32")
    check = tfdp.callbacks.ReplicaCheck(every_steps=100)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[check])
    print(check.checks)  # 1: when training ended
    ```
    """

    def __init__(self, every_steps: int, on_drift: str = "raise"):
        super().__init__()
        check_whole("every_steps", every_steps, least=1)
        check_one_of("on_drift", on_drift, REACTIONS)
        self.every_steps = every_steps
        self.on_drift = on_drift
        #: Number of comparisons.
        self.checks = 0
        #: What drifted, newest last.
        self.drifts: list[Drift] = []
        self._begin_training()

    def _begin_training(self) -> None:
        self._steps = StepCount()
        self._checked_at = 0
        self._reported: set[tuple[str, tuple[int, ...]]] = set()

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._has_several():
            refuse_strategy(self.model.distribute_strategy, "ReplicaCheck")
        self._begin_training()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._steps.begin(batch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._steps.end(batch)
        if is_due(self.every_steps, self._checked_at, self._steps.done):
            self._check()

    def on_train_end(self, logs: Logs = None) -> None:
        if self._steps.done > self._checked_at:
            self._check()

    def _has_several(self) -> bool:
        return bool(self.model.distribute_strategy.num_replicas_in_sync > 1)

    def _check(self) -> None:
        since, self._checked_at = self._checked_at, self._steps.done
        if not self._has_several():
            return
        strategy = self.model.distribute_strategy
        hashes, kept_with, names = [], [], []
        for kept in replicated_state_of(self.model, first_rank_of(strategy)):
            names.append(kept.name)
            kept_with.append(kept.kept_with)
            hashes.append([bit_hash(copy) for copy in kept.copies])
        mine = {
            "hashes": [[int(value) for value in row] for row in hashes],
            "kept_with": kept_with,
            "places": places_of(strategy),
        }
        by_host = gather_from_hosts(strategy, mine, "replicated state")
        places, holdings = _holdings(names, by_host)
        self.checks += 1
        found = find_drifts(holdings)
        self.drifts += found
        if found:
            self._react(found, places, since)

    def _react(self, found: list[Drift], places: Sequence[str], since: int) -> None:
        when = f"between step {since} and step {self._steps.done} of this fit"
        if self.on_drift == "raise":
            raise ReplicaDriftError(describe_drifts(found, places, when), drifts=found)
        news = [d for d in found if (d.variable, d.ranks) not in self._reported]
        self._reported |= {(drift.variable, drift.ranks) for drift in news}
        if news:
            message = describe_drifts(news, places, when)
            warnings.warn(message, ReplicaDriftWarning, stacklevel=2)


def _holdings(
    names: Sequence[str], by_host: Sequence[Any]
) -> tuple[list[str], list[Holding]]:
    """Names of all replicas, and what each holds, from the values of all hosts."""
    places: list[str] = []
    holdings = []
    for host, values in enumerate(by_host):
        if len(values["hashes"]) != len(names):
            raise CollectiveError(
                f"Worker {host} compares {len(values['hashes'])} variables and this "
                f"one {len(names)}. Give every worker the same model and callbacks."
            )
        rows = zip(names, values["hashes"], values["kept_with"], strict=True)
        for name, hashes, kept_with in rows:
            copies = enumerate(zip(hashes, kept_with, strict=True), len(places))
            holdings += [Holding(name, group, rank, h) for rank, (h, group) in copies]
        places += values["places"]
    return places, holdings


def describe_drifts(found: Sequence[Drift], places: Sequence[str], when: str) -> str:
    """Describes what drifted, where and when, and what to do."""
    by_replicas: dict[tuple[tuple[int, ...], bool, int], list[str]] = {}
    for drift in found:
        key = (drift.ranks, drift.is_known, drift.holders)
        by_replicas.setdefault(key, []).append(drift.variable)
    clauses = []
    for (ranks, is_known, holders), variables in by_replicas.items():
        named = ", ".join(variables[:MOST_NAMED])
        more = len(variables) - MOST_NAMED
        named += f" and {more} more" if more > 0 else ""
        replicas = ", ".join(places[rank] for rank in ranks)
        if is_known:
            verb = "differs" if len(ranks) == 1 else "differ"
            others = holders - len(ranks)
            clauses.append(f"{replicas} {verb} from the {others} others in {named}")
        else:
            clauses.append(f"{replicas} differ in {named}; there is no majority")
    return (
        f"Replicas have drifted {when}: {'; '.join(clauses)}. Either a device or its "
        "memory made an error, or the program assigned to a variable on one replica. "
        "Restore a checkpoint from before; if it names the same replica again, check "
        "that device."
    )
