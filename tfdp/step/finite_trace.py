"""Where a number that is not finite came from: a batch, computed again and looked at.

The step of a batch that was left out runs once more, eagerly, replica after replica,
with the weights that each replica has now, which are those from before that step. What
it computes is looked at in the order in which it comes about:

    weight      of the model, or of the optimizer's state, before anything is computed
    input       the batch itself
    layer       the outputs of layers, the innermost first
    loss        what `compute_loss` returned
    gradient    what the optimizer would get, before it is summed over the replicas

Nothing is updated: optimizers only look on, and what the step stores is put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import layers_within
from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.sharding.variables import ShardedVariable
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.local_run import LooksApart
from tfdp.variables.local_view import LocalView


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is not finite on one replica.

    Args:
      rank: the replica, among those of all hosts.
      kind: "weight", "input", "layer", "loss" or "gradient"; "unknown" when the batch
        could not be computed again.
      name: of the variable, the part of the batch or the layer; the reason of an
        "unknown".
      nans, infinities: how many of its numbers.
      numbers: how many it has.
      row: of this replica's part of the batch, the first with one; None: it has no
        rows.
    """

    rank: int
    kind: str
    name: str
    nans: int = 0
    infinities: int = 0
    numbers: int = 0
    row: int | None = None


def find_not_finite(
    model: keras.Model, batches: Sequence[Any] | None, first_rank: int
) -> list[Finding]:
    """What is not finite, replica by replica, each in the order it came about.

    Of layers the first one is told, of gradients all.

    Args:
      model: whose step it is.
      batches: what each replica's step was given, as (args, kwargs), None for a replica
        that has left out nothing; None: nobody kept it.
      first_rank: that of this process's first replica.
    """
    strategy = model.distribute_strategy
    looks = [
        _Look(first_rank + rank)
        for rank in range(len(strategy.extended.worker_devices))
    ]
    for rank, look in enumerate(looks):
        for name, copy in state_of_replica(model, rank):
            look.at("weight", name, copy.read_value())
    if any(look.findings for look in looks):
        return [finding for look in looks for finding in look.findings]
    if batches is None:
        reason = "its batch was filled up to a fixed size (pad_batches)"
        return [Finding(first_rank, "unknown", reason)]
    bad = [one for one in zip(looks, batches, strict=True) if one[1] is not None]
    if not bad:
        return [Finding(first_rank, "unknown", "no replica has kept its batch")]
    for look, (args, _) in bad:
        for name, part in _named_parts(args):
            look.at("input", name, part, has_rows=True)
    # The step runs on all replicas, on the others with what nobody looks at.
    given = [bad[0][1] if batch is None else batch for batch in batches]
    try:
        with _as_it_was(model), _looking(model, looks):
            _run_again(model, strategy, given, looks)
    except Exception as error:  # what a model's own step may raise, nobody knows
        # Keras says first where it was, and then what.
        lines = [line for line in str(error).splitlines() if line.strip()][:2]
        words = f"{type(error).__name__}: {' '.join(lines)}"
        bad[0][0].findings.append(Finding(bad[0][0].rank, "unknown", words))
    return [finding for look, _ in bad for finding in look.findings]


def weights_not_finite(model: keras.Model, first_rank: int) -> list[Finding]:
    """The weights, and the optimizer's state, that are not finite on some replica."""
    looks = []
    for rank in range(len(model.distribute_strategy.extended.worker_devices)):
        look = _Look(first_rank + rank)
        for name, copy in state_of_replica(model, rank):
            look.at("weight", name, copy.read_value())
        looks += look.findings
    return looks


def state_of_replica(
    model: keras.Model, rank: int
) -> Iterator[tuple[str, tf.Variable]]:
    """Weights and the optimizer's state as a replica of this process holds them."""
    states = [owner.variables for owner in optimizers_of(model)]
    for variable in itertools.chain(model.weights, *states):
        value = variable.value
        if isinstance(value, ShardedVariable):
            yield variable.path, value.shard(rank)
        elif isinstance(value, LocalView) and value.has_local:
            yield variable.path, value.local_copy(rank)
        elif hasattr(value, "values"):
            yield variable.path, value.values[rank]


class _Look:
    """What one replica finds.

    Args:
      rank: among those of all hosts.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.findings: list[Finding] = []

    def at(self, kind: str, name: str, value: Any, *, has_rows: bool = False) -> bool:
        """Looks at a tensor; whether it found something."""
        if isinstance(value, (tf.RaggedTensor, tf.IndexedSlices, tf.SparseTensor)):
            value, has_rows = value.values, False
            if isinstance(value, tf.RaggedTensor):
                value = value.flat_values
        if not isinstance(value, tf.__internal__.EagerTensor):
            return False  # within a function that the model compiles by itself
        if not value.dtype.is_floating or tf.reduce_all(tf.math.is_finite(value)):
            return False
        nans = int(tf.math.count_nonzero(tf.math.is_nan(value)))
        infinities = int(tf.math.count_nonzero(tf.math.is_inf(value)))
        row = None
        if has_rows and value.shape.rank:
            row = int(tf.where(~tf.math.is_finite(value))[0, 0])
        size = int(tf.size(value))
        found = Finding(self.rank, kind, name, nans, infinities, size, row)
        self.findings.append(found)
        return True

    def has(self, kind: str) -> bool:
        """Whether it has found such a thing."""
        return any(finding.kind == kind for finding in self.findings)


def _only_looks(optimizer: Any, looks: Sequence[_Look]) -> dict[str, Callable]:
    """What an optimizer does meanwhile: it looks at gradients, and updates nothing."""

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        look = looks[current_rank()]
        variables = trainable_variables or variables_built_with(optimizer)
        for gradient, variable in zip(grads, variables, strict=False):
            if gradient is not None:
                look.at("gradient", variable.path, gradient)

    def apply_gradients(grads_and_vars: Any, **more: Any) -> None:
        apply(*zip(*grads_and_vars, strict=True))

    return {"apply": apply, "apply_gradients": apply_gradients}


def _run_again(
    model: keras.Model, strategy: Any, batches: Sequence[Any], looks: Sequence[_Look]
) -> None:
    owned = optimizers_of(model)
    # Those too that a model holds in an object of its own.
    every = strategy.extended.made_optimizers.together_with(owned)
    only_looks = [(o, _only_looks(o, looks)) for o in every]
    structure = batches[0]
    columns = zip(
        *(tf.nest.flatten(batch, expand_composites=True) for batch in batches),
        strict=True,
    )
    values = [
        strategy.experimental_distribute_values_from_function(
            functools.partial(_part_of, column, looks[0].rank)
        )
        for column in columns
    ]

    def again(parts: list[Any]) -> None:
        for optimizer, methods in only_looks:
            # On top of those that lead it in this run, and are gone with it.
            vars(optimizer).update(methods)
        arguments = tf.nest.pack_sequence_as(structure, parts, expand_composites=True)
        args, kwargs = arguments
        model.train_step(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for optimizer, methods in only_looks:
            stack.enter_context(instance_attributes(optimizer, methods))
        is_apart = any(getattr(o, "sync", None) is not None for o in owned)
        strategy.run(LooksApart(again) if is_apart else again, args=(values,))


def _part_of(column: Sequence[tf.Tensor], first_rank: int, context: Any) -> tf.Tensor:
    return column[context.replica_id_in_sync_group - first_rank]


def _named_parts(args: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a batch, under names that a person knows."""
    if len(args) != 1:
        parts = {f"argument {place}": part for place, part in enumerate(args)}
    else:
        names = ("x", "y", "sample_weight")
        parts = dict(
            zip(names, keras.utils.unpack_x_y_sample_weight(*args), strict=True)
        )
    for name, part in parts.items():
        for path, leaf in keras.tree.flatten_with_path(part):
            where = "".join(f"[{key!r}]" for key in path)
            if leaf is not None:
                yield name + where, leaf


@contextlib.contextmanager
def _looking(model: keras.Model, looks: Sequence[_Look]) -> Iterator[None]:
    """While this lasts, each replica looks at what `model` computes."""
    with contextlib.ExitStack() as stack:
        for layer in layers_within(model):
            if layer is not model:
                led = {"call": _looked_at(layer.call, layer, looks)}
                stack.enter_context(instance_attributes(layer, led))
        of_model = {"compute_loss": _loss_looked_at(model.compute_loss, looks)}
        stack.enter_context(instance_attributes(model, of_model))
        yield


def _looked_at(call: Callable, layer: Any, looks: Sequence[_Look]) -> Callable:
    @functools.wraps(call)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        look = looks[current_rank()]
        for output in tf.nest.flatten(outputs):
            if not look.has("layer"):
                look.at("layer", layer.path, output, has_rows=True)
        return outputs

    return looked_at


def _loss_looked_at(compute: Callable, looks: Sequence[_Look]) -> Callable:
    @functools.wraps(compute)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        if loss is not None:
            looks[current_rank()].at("loss", "the loss", tf.convert_to_tensor(loss))
        return loss

    return looked_at


@contextlib.contextmanager
def _as_it_was(model: keras.Model) -> Iterator[None]:
    """Puts back, in the end, what a step stores: statistics, sums, random states, and
    averages of weights that it takes itself."""
    copies = []
    for variable in [*model.variables, *model.metrics_variables]:
        value = variable.value
        if isinstance(value, ShardedVariable):
            copies += [value.shard(rank) for rank in range(len(value.values))]
            continue
        copies += list(getattr(value, "values", ()))
        # By its class: what a metric's variable has not, TensorFlow looks for in its
        # sum over all hosts, of which some may be in a step.
        if isinstance(value, LocalView) and value.has_local:
            copies += [value.local_copy(rank) for rank in range(len(value.values))]
    before = [copy.read_value() for copy in copies]
    try:
        yield
    finally:
        for copy, value in zip(copies, before, strict=True):
            copy.assign(value)
