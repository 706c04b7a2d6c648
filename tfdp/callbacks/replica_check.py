"""`ReplicaCheck`: notices a replica whose weights are not those of the others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdp.callbacks.gather_from_hosts import (
    first_rank_of,
    gather_from_hosts,
    places_of,
    refuse_strategy,
)
from tfdp.callbacks.step_count import StepCount, is_due
from tfdp.checks import is_whole
from tfdp.errors import (
    CollectiveError,
    ConfigurationError,
    ReplicaDriftError,
    ReplicaDriftWarning,
)
from tfdp.plan.drift import Drift, Holding, find_drifts
from tfdp.step.replicated_state import replicated_state_of
from tfdp.variables.bit_hash import bit_hash

REACTIONS = ("raise", "warn")
# An error names so many variables; `drifts` has all.
MOST_NAMED = 5


class ReplicaCheck(keras.callbacks.Callback):
    """Compares what replicas keep alike, over all replicas of all hosts, bit for bit.

    Replicas that begin alike and update alike stay alike; nothing in training looks
    whether they do. A flipped bit in a device's memory, a driver that computes
    otherwise on one machine, or a variable that a program assigned on one replica goes
    unseen: the loss still falls, to somewhere else. Every `every_steps` steps, and
    when training ends, each replica hashes the bits of its weights, of the optimizer's
    state and of what else is kept alike (`tfdp.step.replicated_state`), and the hashes
    are compared. Where more than half of the holders of a variable agree, the others
    are named, by rank, device and worker; of two replicas, both are.

    -0.0 and 0.0 differ, and so do two NaN of other bits. With `shard=` a shard is held
    once, so that only what is whole everywhere is compared; with shard_group="host" the
    shards of the hosts, too. With `sync=` it is the outer weights, and within a group
    that steps together the local ones. With gradient accumulation what layers store is
    compared right after an update only. Metrics, accumulated gradients and random
    states are each replica's own and not compared.

    Args:
      every_steps: steps from one comparison to the next, at least 1. With
        `steps_per_execution` it takes place after the execution in which it is due.
      on_drift: "raise", or "warn": a `ReplicaDriftWarning` for each variable and
        replica, once, and training goes on.

    Raises:
      ConfigurationError: when an argument is not as above; when training starts: under
        a strategy of several replicas that is not tfdp's, or is of a TPU.
      ReplicaDriftError: after a comparison, on all hosts, when something drifted; its
        `drifts` holds all of it.

    Cost: reads everything that is compared, on its device: some 3 ns of a CPU's core
    for 4 bytes (21 million parameters with Adam on two replicas: 0.34 s, the first time
    0.9 s), and up to a millisecond for each variable; some 30 bytes to each other host
    for each variable and replica. Nothing in the steps between. With one replica there
    is nothing to compare, and it does nothing.

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
        if not is_whole(every_steps, least=1):
            raise ConfigurationError(
                f"every_steps must be an int of at least 1. Received: {every_steps!r}."
            )
        if on_drift not in REACTIONS:
            raise ConfigurationError(
                f"on_drift must be one of {', '.join(map(repr, REACTIONS))}. Received: "
                f"{on_drift!r}."
            )
        self.every_steps = every_steps
        self.on_drift = on_drift
        #: Comparisons that were made.
        self.checks = 0
        #: What was found, newest last.
        self.drifts: list[Drift] = []
        self._begin_training()

    def _begin_training(self) -> None:
        self._steps = StepCount()
        self._checked_at = 0
        self._told: set[tuple[str, tuple[int, ...]]] = set()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a strategy whose replicas it cannot see.

        Raises:
          ConfigurationError: then.
        """
        if self._has_several():
            refuse_strategy(self.model.distribute_strategy, "ReplicaCheck")
        self._begin_training()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Notes the first step of an execution."""
        self._steps.begin(batch)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Compares when it is time.

        Raises:
          ReplicaDriftError: when something drifted.
        """
        self._steps.end(batch)
        if is_due(self.every_steps, self._checked_at, self._steps.done):
            self._check()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Compares what training ends with.

        Raises:
          ReplicaDriftError: when something drifted.
        """
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
        everybody = gather_from_hosts(strategy, mine, "what replicas keep alike")
        places, holdings = _holdings(names, everybody)
        self.checks += 1
        found = find_drifts(holdings)
        self.drifts += found
        if found:
            self._react(found, places, since)

    def _react(self, found: list[Drift], places: Sequence[str], since: int) -> None:
        when = f"between step {since} and step {self._steps.done} of this fit"
        if self.on_drift == "raise":
            raise ReplicaDriftError(in_words(found, places, when), drifts=found)
        news = [d for d in found if (d.variable, d.ranks) not in self._told]
        self._told |= {(drift.variable, drift.ranks) for drift in news}
        if news:
            message = in_words(news, places, when)
            warnings.warn(message, ReplicaDriftWarning, stacklevel=2)


def _holdings(
    names: Sequence[str], everybody: Sequence[Any]
) -> tuple[list[str], list[Holding]]:
    """All replicas, and what each holds, from what every host tells."""
    places: list[str] = []
    holdings = []
    for host, told in enumerate(everybody):
        if len(told["hashes"]) != len(names):
            raise CollectiveError(
                f"Worker {host} compares {len(told['hashes'])} variables and this "
                f"one {len(names)}. Give every worker the same model and callbacks."
            )
        rows = zip(names, told["hashes"], told["kept_with"], strict=True)
        for name, hashes, kept_with in rows:
            holdings += [
                Holding(name, with_whom, len(places) + rank, value)
                for rank, (value, with_whom) in enumerate(
                    zip(hashes, kept_with, strict=True)
                )
            ]
        places += told["places"]
    return places, holdings


def in_words(found: Sequence[Drift], places: Sequence[str], when: str) -> str:
    """What drifted, where and when, and what to do."""
    by_who: dict[tuple[tuple[int, ...], bool, int], list[str]] = {}
    for drift in found:
        key = (drift.ranks, drift.is_known, drift.holders)
        by_who.setdefault(key, []).append(drift.variable)
    clauses = []
    for (ranks, is_known, holders), variables in by_who.items():
        named = ", ".join(variables[:MOST_NAMED])
        more = len(variables) - MOST_NAMED
        named += f" and {more} more" if more > 0 else ""
        who = ", ".join(places[rank] for rank in ranks)
        if is_known:
            verb = "differs" if len(ranks) == 1 else "differ"
            others = holders - len(ranks)
            clauses.append(f"{who} {verb} from the {others} others in {named}")
        else:
            clauses.append(f"{who} differ in {named}; no majority says who is right")
    return (
        f"Replicas that are kept alike have drifted apart {when}: "
        f"{'; '.join(clauses)}. Either a device or its memory made a mistake, or the "
        "program assigned to a variable on one replica. Go back to a checkpoint from "
        "before that step, and watch whether the same replica is named again."
    )
