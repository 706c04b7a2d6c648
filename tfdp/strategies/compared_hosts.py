"""Notices that hosts have drifted apart, where a loop of `fit` starts or ends.

Hosts begin with the same weights and get the same sums of gradients, so that they stay
alike while their programs do the same. A shuffle without a seed, weights that one host
alone sets, or a learning rate that each host draws would go unseen: the loss still
falls. At moments when the hosts wait for each other anyway, they compare a checksum of
what must be the same on all of them; only where it differs they exchange the checksums
of all variables and batches, and find what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdp._private.optimizer_hooks import rate_of
from tfdp.callbacks.told_by_all import first_rank_of, told_by_all
from tfdp.data.batch_record import BatchRecord, common_ends, first_differences
from tfdp.errors import CollectiveError, ReplicaDriftError
from tfdp.hosts.host_link import Compared
from tfdp.step.held_optimizers import innermost_optimizers, optimizers_of
from tfdp.step.replicated_state import kept_alike
from tfdp.variables.bit_hash import bit_hash

__all__ = ["ComparedHosts"]

DIGEST_BYTES = 16
MOST_NAMED = 5
RATE = "the learning rate"
OFF = "Communication(compare_hosts=False) turns this comparison off."


class ComparedHosts(Compared):
    """What all hosts must have in common in one loop of `fit`, `evaluate`, `predict`.

    Args:
      strategy: of several hosts.
      loop: its name, for errors.
      fit: what Keras' `fit` holds, if the loop is an epoch of one; else None.
      record: of the batches that all hosts read; None: each host reads its own.
      taken: how many batches the steps have taken from each iterator; None: unknown.
    """

    def __init__(
        self,
        strategy: Any,
        loop: str,
        fit: Mapping[str, Any] | None,
        record: BatchRecord | None,
        taken: Callable[[], Sequence[int] | None],
    ):
        self._strategy = strategy
        self._loop = loop
        self._model = None if fit is None else fit["self"]
        self._is_last = fit is not None and fit["epoch"] + 1 >= fit["epochs"]
        self._record = record
        self._taken = taken
        self._told: dict[str, Any] = {}
        self._names: list[str] = []

    def digest(self, *, is_end: bool) -> str:
        """See `Compared.digest`."""
        self._told = {}
        # What happens between epochs is seen when the next one starts.
        is_last = self._is_last or getattr(self._model, "stop_training", False)
        if self._model is not None and (is_last or not is_end):
            state = state_of_host(self._model)
            # Keras numbers names by what a process has made before: hosts may differ.
            self._names = [name for name, _ in state]
            self._told["state"] = [value for _, value in state]
        if self._record is not None and is_end:
            batches = self._record.told(self._taken())
            self._record.forget({i: n + len(told) for i, (n, told) in batches.items()})
            self._told["batches"] = batches
        if not self._told:
            return ""
        told = json.dumps(self._told, sort_keys=True).encode()
        return hashlib.blake2b(told, digest_size=DIGEST_BYTES).hexdigest()

    def explain(self, *, is_end: bool) -> None:
        """See `Compared.explain`.

        Raises:
          CollectiveError: the hosts have read different batches.
          ReplicaDriftError: they have other weights, optimizer state or learning rate.
        """
        what = f"what hosts have in common in {self._loop}"
        everybody = told_by_all(self._strategy, self._told, what)
        batches = [_batches_of(told) for told in everybody]
        for rank, (iterator, number) in first_differences(batches).items():
            raise CollectiveError(_other_batches(self._loop, rank, iterator, number))
        when = f"{'end' if is_end else 'start'} of {self._loop}"
        clauses = _state_in_words(
            self._names, [told.get("state", []) for told in everybody]
        )
        if clauses:
            raise ReplicaDriftError(_drifted(when, clauses))
        # Hosts read ahead by different numbers of batches: the rest is still to come.
        if self._record is not None and is_end:
            self._record.keep(_batches_of(self._told), common_ends(batches))


def state_of_host(model: keras.Model) -> list[tuple[str, str]]:
    """What every host must have, in one order on all: names, and values in words.

    The values are checksums of variables, and learning rates.
    """
    hashes = []
    for kept in kept_alike(model, first_rank_of(model.distribute_strategy)):
        if kept.spans_hosts:
            # Replicas of one host are compared by `ReplicaCheck`.
            copies = dict(zip(kept.kept_with, kept.copies, strict=True))
            hashes += [(kept.name, bit_hash(copy)) for copy in copies.values()]
    # Only now: on a GPU all of them run before one is waited for.
    state = [(name, f"{int(value):08x}") for name, value in hashes]
    for owner in optimizers_of(model):
        for optimizer in innermost_optimizers(owner):
            rate = rate_of(optimizer)
            if rate is not None:
                state.append((f"{RATE} of {optimizer.name}", repr(rate)))
    return state


def _state_in_words(names: Sequence[str], everybody: Sequence[Any]) -> list[str]:
    """For each host that differs from host 0, in what."""
    clauses = []
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        if len(theirs) != len(first):
            continue  # another model, which the first step will not pass
        places = [at for at, value in enumerate(theirs) if value != first[at]]
        rates = [at for at in places if names[at].startswith(RATE)]
        # The learning rate is a variable, too.
        is_rate = [bool(rates) and n.endswith("learning_rate") for n in names]
        others = [names[at] for at in places if at not in rates and not is_rate[at]]
        told = [f"{names[at]} ({theirs[at]} and {first[at]})" for at in rates]
        told += others[:MOST_NAMED]
        if len(others) > MOST_NAMED:
            told.append(f"{len(others) - MOST_NAMED} more variables")
        if told:
            clauses.append(f"worker {rank} differs from worker 0 in {', '.join(told)}")
    return clauses


def _drifted(when: str, clauses: Sequence[str]) -> str:
    return (
        f"The workers have drifted apart by the {when}: {'; '.join(clauses)}. Each "
        "worker would train a model of its own. Likely causes: a change that one "
        "worker alone made (model.set_weights, a file that was loaded or a learning "
        "rate that was set under `if strategy.is_chief`); a callback that draws random "
        "numbers without a seed. Make every change on all workers, with the same "
        "values; strategy.from_chief(array) gives worker 0's array to all. Processors "
        f"of different kinds may round differently. {OFF}"
    )


def _other_batches(loop: str, rank: int, iterator: int, number: int) -> str:
    return (
        f"The workers read different batches in {loop}: worker {rank} differs from "
        f"worker 0 from batch {number + 1} of pass {iterator + 1} over the data on. "
        "Each worker takes its rows of the same global batches, so that some rows were "
        "read several times, and others not at all. Likely causes: a shuffle or a "
        "generator without a seed, deterministic=False in map or interleave, random "
        "operations in a map with num_parallel_calls, an order of files that depends "
        "on the machine. Give every shuffle and generator the same seed on all "
        "workers, or make each worker's own part with "
        f"strategy.distribute_datasets_from_function. {OFF}"
    )


def _batches_of(told: Mapping[str, Any]) -> dict[int, tuple[int, list[str]]]:
    return {
        int(iterator): (first, checksums)
        for iterator, (first, checksums) in told.get("batches", {}).items()
    }
