"""The loops of Keras that all hosts run together: led, named, and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private import frames
from tfdp._private.keras_loops import lead_loop, noticing_loops
from tfdp.data.batch_record import BatchRecord
from tfdp.data.grain_shards import has_own_shard
from tfdp.data.hosts import own_part, until_all_end
from tfdp.data.same_batches import new_dataset_name
from tfdp.hosts.host_link import NOTHING_TO_COMPARE, HostLink
from tfdp.strategies.chief_callbacks import let_only_the_chief_write, share_state
from tfdp.strategies.compared_hosts import ComparedHosts
from tfdp.strategies.worker_settings import policies_of

__all__ = ["LedLoops", "lead_callbacks"]

InWords = Callable[[], str]
Taken = Callable[[], list[int] | None]


def lead_callbacks(strategy: Any, fit: tuple[Any, Any] | None) -> None:
    """Lets only worker 0 write files in a `fit`.

    Args:
      strategy: of several hosts.
      fit: its model and its callbacks; None: there is no `fit`.
    """
    if fit is None:
        return
    let_only_the_chief_write(
        fit[1],
        strategy.is_chief,
        lambda model, restored: share_state(
            model, restored, strategy.is_chief, strategy.from_chief
        ),
        all_must_read=strategy.shards_over_hosts,
    )


class LedLoops:
    """The loops of `fit`, `evaluate` and `predict` over the datasets of a strategy.

    Args:
      strategy: of several hosts.
      link: to the other hosts.
      compares: whether hosts compare what must be the same on all of them.
    """

    def __init__(self, strategy: Any, link: HostLink, compares: bool):
        self._strategy = strategy
        self._link = link
        self._compares = compares

    def part_of_host(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """What this host reads of `dataset`, in the loop that is about to begin."""
        fit, loop = frames.fit_of_caller(), frames.loop_of_caller()
        lead_callbacks(self._strategy, fit)
        link, name = self._link, new_dataset_name()
        if has_own_shard(frames.adapter_of_caller(), link):
            self._lead(loop, name)
            return until_all_end(dataset, link, name)
        # Without a loop there is no moment at which hosts could compare.
        record = BatchRecord() if self._compares and loop is not None else None
        self._lead(loop, name, record)
        policies = policies_of(fit[0]) if fit is not None else ""
        return own_part(dataset, link, policies, name, record)

    def part_of_function(self, dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
        """This host's own `dataset`, for as long as another host has batches."""
        return until_all_end(dataset, self._link, name)

    def noticed(self, distributed: Any, name: str) -> Any:
        """`distributed`, a distributed dataset, whose later loops are led as well."""

        def lead(loop: Any) -> None:
            lead_callbacks(self._strategy, frames.fit_of_caller())
            self._lead(loop, name)

        return noticing_loops(distributed, lead)

    def _lead(self, loop: Any, dataset: str, record: BatchRecord | None = None) -> None:
        """Lets all hosts start `loop`, and run it together; None: there is none.

        Args:
          loop: what leads through its epochs.
          dataset: the name of what it reads, the same on all hosts.
          record: of the batches that all hosts read; None: each host reads its own.
        """
        if loop is None:
            return
        # Before anything is built or reset, which takes exchanges: a worker that is
        # elsewhere, as in the next step of the loop around this one, would not come.
        is_fit = frames.training_input_of_caller() is not None
        call = f"{frames.loop_around()[0]} ({dataset})"
        self._link.start(call, only_within_a_loop=not is_fit)

        def around(
            made: InWords, planned: InWords, taken: Taken
        ) -> contextlib.AbstractContextManager[None]:
            kind, held = frames.loop_around()
            which = f"epoch {held['epoch'] + 1} of fit" if kind == "fit" else kind
            name = f"{which or 'a loop'} ({dataset})"
            compared = NOTHING_TO_COMPARE
            if self._compares:
                fit = held if kind == "fit" else None
                compared = ComparedHosts(self._strategy, name, fit, record, taken)
            return self._link.loop_of_steps(made, planned, name, compared)

        lead_loop(loop, around)
