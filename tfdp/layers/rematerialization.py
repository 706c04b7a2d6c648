"""Activation checkpointing: recomputes activations instead of storing them.

T. Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import keras
import tensorflow as tf

from tfdp._private.keras_layers import (
    autocasting_as,
    call_context,
    calling_as,
    get_autocast_scope,
)
from tfdp._private.keras_models import layers_within, mask_of, seed_generators_of
from tfdp._private.names import VariableWatcher, replicas_of, stop_recording
from tfdp._private.step_ops import operations_within, reads_only_shapes
from tfdp.checks import is_whole, what_it_is
from tfdp.errors import ConfigurationError, TooLateWarning
from tfdp.layers import recompute
from tfdp.layers.segments import cut_in_segments
from tfdp.lint.op_kinds import assigns, draws
from tfdp.seams.replace import replace, restore
from tfdp.tracing.gradient_exchanges import exchanges_of_gradient
from tfdp.tracing.step import current_step
from tfdp.variables.global_seed import drawing_globally

LayerOrModel = TypeVar("LayerOrModel", bound=keras.layers.Layer)
POLICIES = ("each", "whole", "segments")


class _Begun(threading.local):
    """This thread's graph of each direction, and what its blocks were given so far."""

    def __init__(self) -> None:
        self.ways: dict[str, Any] = {}


_local = _Begun()


def remat(
    layer: LayerOrModel,
    policy: str | Callable[[keras.layers.Layer], bool] = "each",
    *,
    prefetch: int = 1,
) -> LayerOrModel:
    """Keeps only the inputs of blocks of layers; the backward pass recomputes the rest.

    The gradient is the same: dropout and noise repeat their draws, and moving
    statistics are updated once. With `shard="parameters"` a block's weights are
    gathered for its forward pass, dropped, and gathered again for its backward pass.

    Args:
      layer: a built or unbuilt layer or model; changed in place.
      policy: the blocks. "each": every layer of a model, or a layer that is no model;
        "whole": the model as one block; "segments": runs of layers of a functional or
        sequential model, cut to minimize memory; a function: the model's layers for
        which it returns True.
      prefetch: how many blocks ahead weights may be gathered, at least 0, which takes
        the least memory.

    Returns:
      `layer`.

    Raises:
      ConfigurationError: for a bad argument; and, when it runs, for a block with ragged
        inputs or `add_loss` (lost gradients), one that assigns to a trainable weight
        (`keras.layers.SpectralNormalization`), and, in graphs only, one that draws by
        TensorFlow instead of `keras.random`, assigns to a `tf.Variable` that is no
        weight, or does either in its own `tf.function`.

    Warns:
      TooLateWarning: the model was trained already, and runs the step traced before
        until it is compiled again. A single layer of such a model gives no warning.

    Cost: one more forward pass. Not saved with the model: call it again after loading,
    and after adding layers to a `Sequential`.

    Differs from `keras.RematScope`: its modes "full" and "larger_than" raise on this
    backend, and its "activations" covers activation functions only.

    ```python
    import keras
    import tfdp

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, "gelu")])
    model = tfdp.remat(model)
    ```
    """
    if not isinstance(layer, keras.layers.Layer):
        raise ConfigurationError(
            f"tfdp.remat takes a Keras layer or model. Received: {what_it_is(layer)}."
        )
    if not callable(policy) and policy not in POLICIES:
        raise ConfigurationError(
            f"policy must be one of {', '.join(map(repr, POLICIES))}, or a function of "
            f"a layer. Received: {policy!r}."
        )
    if not is_whole(prefetch, least=0):
        raise ConfigurationError(
            f"prefetch must be an integer of at least 0. Received: {prefetch!r}."
        )
    if getattr(layer, "train_function", None) and not layer.run_eagerly:
        warnings.warn(
            f"tfdp.remat was called after the model {layer.name!r} was trained; the "
            "next fit runs the step traced before. Call model.compile(...) again, or "
            "tfdp.remat before the first fit.",
            TooLateWarning,
            stacklevel=2,
        )
    layer.is_rematerialized = True  # for `tfdp plan`
    if policy == "segments":
        cut_in_segments(layer, lambda block, call: _twice(block, call, prefetch))
        return layer
    blocks = _blocks(layer, policy)
    if callable(policy) and not blocks:
        raise ConfigurationError(
            f"policy is False for every layer of {layer.name!r}, so nothing would be "
            "computed again. Let it return True for some of them."
        )
    for block in blocks:
        if not getattr(block.call, "is_rematerialized", False):
            replace(block, "call", _twice(block, block.call, prefetch))
    return layer


def _blocks(
    layer: keras.layers.Layer, policy: str | Callable[[keras.layers.Layer], bool]
) -> Sequence[keras.layers.Layer]:
    if policy == "whole" or not isinstance(layer, keras.Model):
        return [layer]
    layers = [x for x in layer.layers if not isinstance(x, keras.layers.InputLayer)]
    if callable(policy):
        return [sublayer for sublayer in layers if policy(sublayer)]
    return layers


def _twice(block: keras.layers.Layer, call: Callable, prefetch: int) -> Callable:
    """A version of `call` that keeps only its inputs for the gradient."""

    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        flat = list(map(recompute.as_read, keras.tree.flatten((args, kwargs))))
        # Sparse rows come from the data and need no gradient.
        places = [i for i, value in enumerate(flat) if isinstance(value, tf.Tensor)]
        _refuse_ragged(block, flat)
        draws = _RandomDraws(block)
        # Keras sets these during a call, but not in the backward pass.
        scope, context = get_autocast_scope(), call_context()

        def compute(tensors: Sequence[tf.Tensor]) -> Any:
            filled = list(flat)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            return call(*own_args, **own_kwargs)

        def compute_again(tensors: Sequence[tf.Tensor]) -> Any:
            with autocasting_as(scope), calling_as(context):
                return compute(tensors)

        tensors = [flat[place] for place in places]
        # Now: `MultiHeadAttention.call` removes the masks of its inputs.
        masks = list(map(mask_of, tensors))
        stored, losses = recompute.stored_in(block), recompute.count_losses(block)
        before = len(_operations())
        with (
            VariableWatcher() as watcher,
            stop_recording(),
            _after_block(tensors, "forward", prefetch),
            draws.recording(),
        ):
            result = compute(tensors)
            made = list(map(recompute.copy_in_name, keras.tree.flatten(result)))
        outputs = [tensor for tensor in made if tensor is not None]
        _refuse_added_losses(block, recompute.count_losses(block) - losses)
        others = _other_draws(_operations()[before:])
        variables = recompute.own_copies(block.trainable_variables)
        # TensorFlow treats frozen weights as trainable, too.
        variables += recompute.read_besides(
            watcher, recompute.own_copies(block.variables)
        )
        in_order = exchanges_of_gradient()

        def backward(*upstream: Any) -> list[Any]:
            # Not in the forward pass: prediction needs no gradient.
            _refuse_other_draws(block, others)
            inputs = list(zip(tensors, masks, strict=True))
            given = compute_again, inputs, upstream, variables, stored, draws, prefetch
            with in_order():
                return _gradients(block, *given)

        recompute.record_gradient(outputs, tensors, variables, backward)
        return keras.tree.pack_sequence_as(result, made)

    rematerialized.is_rematerialized = True  # type: ignore[attr-defined]
    return rematerialized


def _gradients(
    block: keras.layers.Layer,
    compute: Callable,
    given: Sequence[tuple[tf.Tensor, Any]],
    upstream: Sequence[Any],
    variables: Sequence[Any],
    stored: Sequence[Any],
    draws: _RandomDraws,
    prefetch: int,
) -> list[Any]:
    """Gradients of a block's inputs and variables, recomputed from its inputs."""
    arrived = [gradient for gradient in upstream if gradient is not None]
    with _after_block(arrived, "backward", prefetch):
        without, before = recompute.without_updates(stored), len(_operations())
        with tf.GradientTape() as tape, without as scope, draws.replaying():
            # Copies: otherwise TensorFlow would find the existing results.
            inputs = [recompute.copy_in_name(tensor, mask) for tensor, mask in given]
            tape.watch(list(filter(_has_gradient, inputs)))
            made = list(
                map(recompute.copy_in_name, keras.tree.flatten(compute(inputs)))
            )
        _refuse_assigned_weights(block, scope)
        _refuse_assigned_state(block, _operations()[before:])
        outputs = [tensor for tensor in made if tensor is not None]
        used = [
            (output, gradient)
            for output, gradient in zip(outputs, upstream, strict=True)
            if gradient is not None and _has_gradient(output)
        ]
        found = tape.gradient(
            [output for output, _ in used],
            [*inputs, *variables],
            output_gradients=[gradient for _, gradient in used],
        )
        # A gradient that needs only the shape of an input (of padding, sums, reshapes)
        # would keep the input until then.
        reads_only_shapes([t for t, _ in given], inputs, _operations()[before:])
    # An update must not overtake reads of the old weights. TensorFlow adds control
    # edges from reads to updates, but its graph optimizer removes an edge parallel to
    # another path, and later that path (shapes of recomputed tensors).
    with tf.control_dependencies([g for g in found if g is not None]):
        of_variables = [
            None if gradient is None else tf.identity(gradient)
            for gradient in found[len(inputs) :]
        ]
    return [*found[: len(inputs)], *of_variables]


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _operations() -> list[tf.Operation]:
    """Operations of the graph being built.

    None where replicas of a stock strategy build the graph in turn: an operation may
    belong to another replica, which is at another layer by then.
    """
    in_turn = replicas_of(tf.distribute.get_strategy()) > 1
    if in_turn and current_step() is None:
        return []
    found: list[tf.Operation] = tf.compat.v1.get_default_graph().get_operations()
    return found


def _after_block(tensors: Sequence[tf.Tensor], way: str, prefetch: int) -> Any:
    """Delays ops until the block `prefetch` blocks earlier has its inputs.

    Otherwise all weights would be gathered as soon as the step begins.
    """
    if tf.executing_eagerly():
        return tf.control_dependencies(None)
    graph = tf.compat.v1.get_default_graph()
    begun: Any = _local.ways.get(way)
    if begun is None or begun[0]() is not graph:
        begun = _local.ways[way] = (weakref.ref(graph), [])
    begun[1].append(list(tensors))
    earlier = begun[1][max(len(begun[1]) - 1 - prefetch, 0)]
    return tf.control_dependencies(earlier)


# Checks of what a block must not do, because it is computed twice.


def _refuse_ragged(layer: keras.layers.Layer, given: Sequence[Any]) -> None:
    if any(isinstance(value, tf.RaggedTensor) for value in given):
        _refuse(layer, "gets a ragged tensor, and would lose its gradient")


def _refuse_added_losses(layer: keras.layers.Layer, number: int) -> None:
    if number:
        _refuse(layer, "calls add_loss, and would lose its gradient")


def _refuse_assigned_weights(layer: keras.layers.Layer, scope: Any) -> None:
    """`scope`: the `without_updates` of the recomputation."""
    for variable in layer.trainable_variables:
        if id(variable) in scope.state_mapping:
            _refuse(
                layer,
                f"assigns to {variable.path!r} while it computes "
                "(keras.layers.SpectralNormalization does), so that the recomputation "
                "would use another weight",
            )


def _refuse_assigned_state(
    layer: keras.layers.Layer, operations: Sequence[tf.Operation]
) -> None:
    """Refuses assignments in the recomputation that Keras does not control.

    To TensorFlow variables that are no weights, or in a layer's own `tf.function`: its
    graph, with its draws and updates, was traced in the first pass.
    """
    for operation in operations:
        if assigns(operation):
            _refuse(
                layer,
                f"assigns to a tf.Variable ({operation.name}), and would assign again "
                "when it is recomputed",
                "Make it a weight (add_weight(trainable=False))",
            )
        if any(map(assigns, operations_within([operation]))):
            _refuse(
                layer,
                f"draws random numbers or assigns to a variable in a tf.function "
                f"({operation.name}), and would do so again when it is recomputed",
                "Do that outside the tf.function",
            )


def _refuse_other_draws(layer: keras.layers.Layer, draws: str) -> None:
    if draws:
        _refuse(
            layer,
            f"draws random numbers by TensorFlow ({draws}), and would draw different "
            "ones when it is recomputed",
            "Draw with keras.random",
        )


def _other_draws(operations: Sequence[tf.Operation]) -> str:
    """The type of an op with unrepeatable random numbers; "": there is none."""
    made = operations_within(operations)
    return next((str(op.type) for op in made if draws(op)), "")


def _refuse(layer: keras.layers.Layer, why: str, instead: str = "") -> NoReturn:
    way = f"{instead}, or leave" if instead else "Leave"
    raise ConfigurationError(
        f"The layer {layer.name!r} {why}. {way} it out: "
        "tfdp.remat(model, policy=lambda layer: layer is not ...)."
    )


# Repeats the random numbers of a layer.

# A generator's `next`, or its override.
Draw = Callable[[bool], Any]


class _RandomDraws:
    """The seeds that the random layers within `layer` drew in one pass."""

    def __init__(self, layer: keras.layers.Layer):
        self._generators = [
            generator
            for sublayer in layers_within(layer)
            for generator in seed_generators_of(sublayer)
        ]
        self._drawn: list[Any] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records every draw within the context."""
        self._drawn = []

        def recorded(plain: Draw) -> Draw:
            def draw(ordered: bool) -> Any:
                seed = plain(ordered)
                self._drawn.append(seed)
                return seed

            return draw

        with self._drawing(recorded):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Repeats the recorded draws within the context, in their order."""
        left = iter(self._drawn)
        with self._drawing(lambda plain: lambda ordered: next(left)):
            yield

    @contextlib.contextmanager
    def _drawing(self, override: Callable[[Draw], Draw]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for generator in self._generators:
                stack.enter_context(_draw_overrides.overriding(generator, override))
            stack.enter_context(drawing_globally(override))
            yield


class _Draws(threading.local):
    """This thread's way to draw from each generator."""

    def __init__(self) -> None:
        self.draws: dict[int, Draw] = {}


class _DrawOverrides:
    """Overrides `next` of seed generators, in each thread independently.

    Replicas are threads that take turns at a `merge_call`, so one may enter and leave a
    block while another is inside it.
    """

    def __init__(self) -> None:
        self._of_thread = _Draws()
        self._lock = threading.Lock()
        self._users: dict[int, int] = defaultdict(int)

    @contextlib.contextmanager
    def overriding(
        self, generator: Any, override: Callable[[Draw], Draw]
    ) -> Iterator[None]:
        """Applies `override` to draws in this thread; nested blocks stack."""
        key, own = id(generator), self._of_thread.draws
        outer = own.get(key)
        own[key] = override(outer or _plain(generator))
        self._use(generator, 1)
        try:
            yield
        finally:
            self._use(generator, -1)
            if outer is None:
                del own[key]
            else:
                own[key] = outer

    def _use(self, generator: Any, change: int) -> None:
        with self._lock:
            self._users[id(generator)] += change
            if not self._users[id(generator)]:
                del self._users[id(generator)]
                restore(generator, "next")
            elif change > 0:
                replace(generator, "next", self._next_of(generator))

    def _next_of(self, generator: Any) -> Callable:
        def draw(ordered: bool = True) -> Any:
            override = self._of_thread.draws.get(id(generator))
            return (override or _plain(generator))(ordered)

        return draw


_draw_overrides = _DrawOverrides()


def _plain(generator: Any) -> Draw:
    return lambda ordered: type(generator).next(generator, ordered)
