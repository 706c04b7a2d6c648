"""The features of a step, in one order: what tfdp adds to the step of a replica.

Beside them `tfdp.step.call` makes each step wait for its batch, synchronizes what
layers store after the last update, and keeps dummy rows out of gathers.

A feature acts at the moments whose methods it has:

    begin       before the replicas are traced: it looks at the call, or wraps the step
    overrides   methods of Keras' objects that it replaces while replicas are traced
    stages      what it does around a sum of gradients, and around the update
    finish      after all replicas are traced: it warns, or refuses

Of two overrides of one method the later runs first, and calls the earlier. Of stages
the earlier is the outer one: its `before` runs first, and its `after` last.

`FEATURES` is the list, and `tfdp info --step SCRIPT` prints what each does in a step. A
feature's own files are imported where it acts: a plain `fit` loads none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdp._private.optimizer_hooks import momentum_compression_of
from tfdp.chain.reduction import Reduction, Stage, attached_stages
from tfdp.losses import ON_ALL_ROWS
from tfdp.seams.replace import Override
from tfdp.step.buffer_synchronization import warn_about_stored, warn_about_written
from tfdp.step.local_step import begin_local_step
from tfdp.step.losses import added_loss_overrides, reduction_overrides
from tfdp.step.metric_state import warn_if_rows_counted, warn_if_steps_counted
from tfdp.step.optimizers import optimizer_overrides, warn_about_draws
from tfdp.step.reports import report_overrides
from tfdp.step.rows import dummy_row_overrides, padding_overrides
from tfdp.step.rows_in_place import read_in_place
from tfdp.tracing.loss_checks import find_faults_of_losses
from tfdp.tracing.rows import OwnParts
from tfdp.tracing.step import Mode
from tfdp.tracing.stored_state import LocalState

if TYPE_CHECKING:
    from tfdp.step.call import StepCall


class Feature:
    """One thing that tfdp adds to a step; a moment without a method adds nothing."""

    def begin(self, call: StepCall) -> None:
        """Looks at the call before its replicas are traced; may wrap `replica_fn`."""

    def overrides(self, call: StepCall) -> Iterable[Override]:
        """The methods that it replaces while the replicas are traced."""
        return ()

    def stages(self, reduction: Reduction) -> Iterable[Stage]:
        """The stages of this reduction that it needs; the same on all replicas."""
        return ()

    def finish(self, call: StepCall) -> None:
        """Warns of, or refuses, what it has noted, when all replicas are traced."""

    def remarks(self, call: StepCall) -> Iterable[str]:
        """Sentences for `tfdp info --step`, when all replicas are traced."""
        return ()


class Optimizers(Feature):
    """Optimizers get gradients that are summed over the replicas."""

    def overrides(self, call: StepCall) -> Iterator[Override]:
        return optimizer_overrides(call.optimizers, call.step)

    def finish(self, call: StepCall) -> None:
        warn_about_draws(call.step)


class WeightsTogether(Feature):
    """Weights are updated in packs, where each number is updated by itself."""

    def overrides(self, call: StepCall) -> Iterable[Override]:
        if not call.optimizers:
            return ()
        from tfdp.step.packed_updates import packed_overrides

        return packed_overrides(call.optimizers)

    def remarks(self, call: StepCall) -> Iterable[str]:
        from tfdp.step.packed_updates import packs_in_words

        return packs_in_words(call.optimizers)


class Reports(Feature):
    """Metrics report numbers of all rows."""

    def overrides(self, call: StepCall) -> Iterator[Override]:
        return report_overrides(call.model, call.step, call.made_metrics, call.noted)

    def finish(self, call: StepCall) -> None:
        warn_if_rows_counted(call.step)
        warn_if_steps_counted(call.step, call.made_metrics)


class Losses(Feature):
    """A replica's loss is its share of the loss of all rows."""

    def overrides(self, call: StepCall) -> Iterator[Override]:
        yield from reduction_overrides(call.model, call.step, call.fn)
        yield from added_loss_overrides(call.model, call.step)

    def finish(self, call: StepCall) -> None:
        find_faults_of_losses(call.step, call.model, call.fn)


class WholeBatch(Feature):
    """Losses and metrics of a marked model are computed on the rows of all replicas."""

    def overrides(self, call: StepCall) -> Iterable[Override]:
        if call.model not in ON_ALL_ROWS or call.step.replicas == 1:
            return ()
        from tfdp.step.all_rows import all_rows_overrides

        return all_rows_overrides(call.model, call.step)

    def finish(self, call: StepCall) -> None:
        if ON_ALL_ROWS and call.step.replicas > 1:
            from tfdp.step.all_rows import refuse_unused

            refuse_unused(call.model, call.step, call.fn)


class ShardsOfSums(Feature):
    """A replica gets its shard of a gradient's sum (`shard=`), and layers may compute
    with its part of a weight (`layout=`)."""

    def begin(self, call: StepCall) -> None:
        shards = call.strategy.extended.shards
        if shards is not None:
            shards.begin(call)

    def overrides(self, call: StepCall) -> Iterable[Override]:
        shards = call.strategy.extended.shards
        if shards is None:
            return ()
        from tfdp.step.tables import table_overrides

        return (*shards.overrides(call), *table_overrides(call))

    def stages(self, reduction: Reduction) -> Iterator[Stage]:
        shards = tf.distribute.get_strategy().extended.shards
        if shards is not None:
            from tfdp.chain.shards import Shards

            yield Shards(shards)

    def finish(self, call: StepCall) -> None:
        if call.strategy.extended.shards is not None:
            from tfdp.chain.shards import refuse_scaled_shards

            refuse_scaled_shards(call.step)


class TablesWithSameRows(Feature):
    """Gradients of a table with the same rows on all replicas are added in place."""

    def stages(self, reduction: Reduction) -> Iterator[Stage]:
        if reduction.has_table_rows and not reduction.step.is_of_one:
            from tfdp.chain.table_rows import SameRows

            yield SameRows()


class ReplicasWithoutRows(Feature):
    """A replica without rows of its own adds 0."""

    def overrides(self, call: StepCall) -> Iterator[Override]:
        return dummy_row_overrides(call.fn, call.optimizers, call.step)

    def stages(self, reduction: Reduction) -> Iterator[Stage]:
        step, own = reduction.step, reduction.step.trace(reduction.rank).of(OwnParts)
        if step.has_dummy_rows and not own.are_summed:
            from tfdp.chain.missing_rows import MissingRows

            yield MissingRows()


class TableGradients(Feature):
    """Gradients of tables travel as the rows that a batch used."""

    def stages(self, reduction: Reduction) -> Iterator[Stage]:
        if reduction.has_table_rows:
            from tfdp.chain.table_rows import TableRows

            yield TableRows()

    def finish(self, call: StepCall) -> None:
        read_in_place(call.operations)


class LayerState(Feature):
    """Moving statistics, and what else layers store, become means over all rows."""

    def stages(self, reduction: Reduction) -> Iterator[Stage]:
        step = reduction.step
        state = step.trace(reduction.rank).of(LocalState).take()
        if state and not step.is_of_one:  # else the replica's own are the means already
            from tfdp.chain.buffers import Buffers

            yield Buffers(state)

    def finish(self, call: StepCall) -> None:
        warn_about_written(call.step, call.operations)
        warn_about_stored(call.step, call.model)


class Callbacks(Feature):
    """Callbacks look into the sums, or guard the update (`tfdp.step.observers`)."""

    def begin(self, call: StepCall) -> None:
        stages = call.observers_of(Stage)
        guards: list[Any] = [stage for stage in stages if stage.is_guard]
        call.step.stages = [stage for stage in stages if stage not in guards[:-1]]
        for guard in guards[-1:]:
            call.replica_fn = guard.around_step(call.replica_fn)

    def overrides(self, call: StepCall) -> Iterator[Override]:
        # After those of losses and dummy rows: it checks a loss that is 0 for a dummy.
        if call.step.guard is not None:
            yield Override(call.model, "compute_loss", call.step.guard.checks_loss)

    def stages(self, reduction: Reduction) -> list[Stage]:
        return attached_stages(reduction)


class FewerBytes(Feature):
    """Gradients, or the momentum of them, travel in fewer bytes."""

    def stages(self, reduction: Reduction) -> Iterable[Stage]:
        reducer = tf.distribute.get_strategy().extended.reducer
        compressed = getattr(reducer, "compressed", None)
        if momentum_compression_of(reduction.optimizer) is not None:
            from tfdp.chain.momentum import momentum_stages

            return momentum_stages(reduction, reducer)
        if compressed is not None:
            from tfdp.chain.compression import compression_stages

            return compression_stages(reduction, compressed)
        return ()


class LocalSteps(Feature):
    """Groups of replicas step by themselves, and meet now and then (`sync=`)."""

    def begin(self, call: StepCall) -> None:
        begin_local_step(call.fn, call.optimizers, call.step, call.strategy)


class Padding(Feature):
    """Rows that fill a short batch up to a fixed size count nowhere."""

    def overrides(self, call: StepCall) -> Iterable[Override]:
        # Last: losses and metrics of all others get the weights that it sets.
        if call.step.mode is Mode.PADDED:
            return padding_overrides(call.model, call.step, call.made_metrics)
        return ()


FEATURES: list[Feature] = [
    Optimizers(),
    WeightsTogether(),
    WholeBatch(),
    Reports(),
    Losses(),
    ShardsOfSums(),
    TablesWithSameRows(),
    ReplicasWithoutRows(),
    TableGradients(),
    LayerState(),
    Callbacks(),
    FewerBytes(),
    LocalSteps(),
    Padding(),
]
