"""Activation checkpointing: layers compute twice instead of keeping what they computed.

T. Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import keras
import tensorflow as tf

from tfdp._private.keras_layers import (
    autocasting_as,
    call_context,
    calling_as,
    get_autocast_scope,
)
from tfdp._private.keras_models import layers_within, mask_of, seed_generators_of
from tfdp._private.names import VariableWatcher, stop_recording
from tfdp._private.step_ops import ASSIGNS, DRAWS, operations_within, reads_only_shapes
from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError, TooLateWarning
from tfdp.exchange.engine import exchanges_of
from tfdp.layers.recompute import (
    as_read,
    copy_in_name,
    count_losses,
    own_copies,
    read_besides,
    record_gradient,
    stored_in,
    without_updates,
)
from tfdp.layers.segments import cut_in_segments
from tfdp.tracing.run import current_run, name_of_gradient
from tfdp.variables.global_seed import drawing_globally

LayerOrModel = TypeVar("LayerOrModel", bound=keras.layers.Layer)
POLICIES = ("each", "whole", "segments")

_local = threading.local()


def remat(
    layer: LayerOrModel,
    policy: str | Callable[[keras.layers.Layer], bool] = "each",
    *,
    prefetch: int = 1,
) -> LayerOrModel:
    """Keeps only the inputs of blocks of layers; backprop computes the rest again.

    The gradient is the same: dropout and noise repeat their draws, and moving
    statistics are updated once. With `shard="parameters"` the weights of a block are
    gathered for its forward pass, dropped, and gathered again for its backward pass.

    Args:
      layer: a built or unbuilt layer or model; changed in place.
      policy: what is a block. "each": every layer that a model calls, and a layer that
        is no model itself; "whole": the model as one block; "segments": runs of layers
        of a functional or sequential model, so cut that least is held at once; a
        function: those of the model's layers for which it returns True.
      prefetch: for how many blocks ahead weights may be gathered, at least 0, which
        takes the least memory.

    Returns:
      `layer`.

    Raises:
      ConfigurationError: when an argument is not as above, and, when it runs, for a
        block that is given ragged tensors or calls `add_loss`, whose gradient would be
        lost; that assigns to a weight that is trained
        (`keras.layers.SpectralNormalization`); and, seen in graphs but not with
        `run_eagerly=True`, that draws random numbers by TensorFlow and not by
        `keras.random`, assigns to a variable of TensorFlow which is no weight, or
        draws or assigns in a `tf.function` of its own.

    Warns:
      TooLateWarning: the model was trained already; the next `fit` runs the step that
        was traced then, until the model is compiled again. A layer of such a model
        cannot tell.

    Cost: one more forward pass. Not saved with the model: call it again after loading,
    and after layers were added to a `Sequential`.

    Differs from `keras.RematScope`: its modes "full" and "larger_than" raise on this
    backend, and its "activations" covers activation functions only.

    ```python
    import keras
    import tfdp

    model = tfdp.remat(
        keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, "gelu")])
    )
    ```
    """
    if not isinstance(layer, keras.layers.Layer):
        raise ConfigurationError(
            f"tfdp.remat takes a Keras layer or model. Received: {layer!r}."
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
            f"tfdp.remat came after the model {layer.name!r} was trained, whose next "
            "fit runs the step as it was traced before. Call model.compile(...) once "
            "more, or tfdp.remat before the first fit.",
            TooLateWarning,
            stacklevel=2,
        )
    if policy == "segments":
        cut_in_segments(layer, lambda block, call: _twice(block, call, prefetch))
        return layer
    for block in _blocks(layer, policy):
        if not getattr(block.call, "is_rematerialized", False):
            # Past Keras' own __setattr__, which refuses changes after the build.
            vars(block)["call"] = _twice(block, block.call, prefetch)
    return layer


def _blocks(
    layer: keras.layers.Layer, policy: str | Callable[[keras.layers.Layer], bool]
) -> Sequence[keras.layers.Layer]:
    if policy == "whole" or not isinstance(layer, keras.Model):
        return [layer]
    layers = [
        sublayer
        for sublayer in layer.layers
        if not isinstance(sublayer, keras.layers.InputLayer)
    ]
    if callable(policy):
        return [sublayer for sublayer in layers if policy(sublayer)]
    return layers


def _twice(block: keras.layers.Layer, call: Callable, prefetch: int) -> Callable:
    """`call`, which keeps nothing but its inputs for its gradient."""

    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        flat = list(map(as_read, keras.tree.flatten((args, kwargs))))
        # Sparse rows come from the data: nobody asks for their gradient.
        places = [i for i, value in enumerate(flat) if isinstance(value, tf.Tensor)]
        refuse_ragged(block, flat)
        draws = RandomDraws(block)
        # What Keras says while it calls a layer, and nobody in the backward pass.
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
        # Now: `MultiHeadAttention.call` takes the masks of its inputs away.
        masks = list(map(mask_of, tensors))
        stored, losses = stored_in(block), count_losses(block)
        before = len(_operations())
        with (
            VariableWatcher() as watcher,
            stop_recording(),
            _after_block(tensors, "forward", prefetch),
            draws.recording(),
        ):
            result = compute(tensors)
            made = list(map(copy_in_name, keras.tree.flatten(result)))
        outputs = [tensor for tensor in made if tensor is not None]
        refuse_added_losses(block, count_losses(block) - losses)
        others = other_draws(_operations()[before:])
        variables = own_copies(block.trainable_variables)
        # Frozen ones are for TensorFlow trainable all the same.
        variables += read_besides(watcher, own_copies(block.variables))
        name = name_of_gradient()

        def backward(*upstream: Any) -> list[Any]:
            # Not before: who predicts asks for no gradient.
            refuse_other_draws(block, others)
            inputs = _Inputs(tensors, masks)
            given = compute_again, inputs, upstream, variables, stored, draws, prefetch
            with exchanges_of(name):
                return _gradients(block, *given)

        record_gradient(outputs, tensors, variables, backward)
        return keras.tree.pack_sequence_as(result, made)

    rematerialized.is_rematerialized = True  # type: ignore[attr-defined]
    return rematerialized


class _Inputs(NamedTuple):
    """What a block was given, and the mask that each had then."""

    tensors: Sequence[tf.Tensor]
    masks: Sequence[Any]


def _gradients(
    block: keras.layers.Layer,
    compute: Callable,
    given: _Inputs,
    upstream: Sequence[Any],
    variables: Sequence[Any],
    stored: Sequence[Any],
    draws: RandomDraws,
    prefetch: int,
) -> list[Any]:
    """Those of a block's inputs and variables, from its inputs alone."""
    arrived = [gradient for gradient in upstream if gradient is not None]
    with _after_block(arrived, "backward", prefetch):
        without, before = without_updates(stored), len(_operations())
        with tf.GradientTape() as tape, without as scope, draws.replaying():
            # Copies in name: TensorFlow would find that the results exist already.
            inputs = list(map(copy_in_name, *given))
            tape.watch(list(filter(_has_gradient, inputs)))
            made = list(map(copy_in_name, keras.tree.flatten(compute(inputs))))
        refuse_assigned_weights(block, scope)
        refuse_assigned_state(block, _operations()[before:])
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
        # A gradient that needs no more of an input than its shape (of padding, sums,
        # reshapes) would keep it until then.
        reads_only_shapes(given.tensors, inputs, _operations()[before:])
    # An update must not overtake what still reads the old weights. TensorFlow says so
    # by control edges from reads to updates, but its graph optimizer takes one away
    # where it sees a path beside it, and then the path (shapes of what is computed
    # again).
    with tf.control_dependencies([g for g in found if g is not None]):
        of_variables = [
            None if gradient is None else tf.identity(gradient)
            for gradient in found[len(inputs) :]
        ]
    return [*found[: len(inputs)], *of_variables]


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _operations() -> list[tf.Operation]:
    """Those of the graph being built; eagerly there are none.

    Nor where replicas of another strategy build it in turn: an operation may be
    another replica's there, which has come to a layer of its own meanwhile.
    """
    in_turn = tf.distribute.get_strategy().num_replicas_in_sync > 1
    if tf.executing_eagerly() or (in_turn and current_run() is None):
        return []
    found: list[tf.Operation] = tf.compat.v1.get_default_graph().get_operations()
    return found


def _after_block(tensors: Sequence[tf.Tensor], way: str, prefetch: int) -> Any:
    """Nothing within begins before the block `prefetch` blocks earlier began.

    Weights would else be gathered as soon as the step begins, all of them at once.
    """
    if tf.executing_eagerly():
        return tf.control_dependencies(None)
    graph = tf.compat.v1.get_default_graph()
    begun: Any = getattr(_local, way, None)
    if begun is None or begun[0]() is not graph:
        begun = (weakref.ref(graph), [])
        setattr(_local, way, begun)
    begun[1].append(list(tensors))
    earlier = begun[1][max(len(begun[1]) - 1 - prefetch, 0)]
    return tf.control_dependencies(earlier)


# What a block must not do that is computed twice, and how it is refused.


def refuse_ragged(layer: keras.layers.Layer, given: Sequence[Any]) -> None:
    """Refuses a layer that is given a ragged tensor.

    Args:
      layer: the block, as in the other refusals.
      given: what it is called with.

    Raises:
      ConfigurationError: with what to do, as the others do.
    """
    if any(isinstance(value, tf.RaggedTensor) for value in given):
        _refuse(
            layer,
            "is given a ragged tensor, whose gradient would be lost in a block that "
            "is computed again",
        )


def refuse_added_losses(layer: keras.layers.Layer, number: int) -> None:
    """Refuses a layer that has called `add_loss` so many times."""
    if number:
        _refuse(
            layer,
            "calls add_loss, whose gradient would be lost in a block that is computed "
            "again",
        )


def refuse_assigned_weights(layer: keras.layers.Layer, scope: Any) -> None:
    """Refuses a layer that assigns to a weight that is trained.

    Args:
      layer: that was computed once more.
      scope: of `without_updates`, in which it was.

    Raises:
      ConfigurationError: when it has assigned to one in this pass.
    """
    for variable in layer.trainable_variables:
        if id(variable) in scope.state_mapping:
            _refuse(
                layer,
                f"assigns to {variable.path!r} while it computes "
                "(keras.layers.SpectralNormalization does), and when it is computed "
                "again that weight is another one",
            )


def refuse_assigned_state(
    layer: keras.layers.Layer, operations: Sequence[tf.Operation]
) -> None:
    """Refuses a layer that assigns where Keras does not know of it.

    To variables of TensorFlow, which are no weights, or in a `tf.function` of its own,
    whose graph is there since the first pass: with its draws, moving statistics and
    counters.

    Args:
      layer: that was computed once more, without updates of Keras' variables.
      operations: of that pass.

    Raises:
      ConfigurationError: with what to do.
    """
    for operation in operations:
        if operation.type in ASSIGNS:
            _refuse(
                layer,
                f"assigns to a tf.Variable ({operation.name}), and would assign once "
                "more when it is computed again",
                "Make it a weight (add_weight(trainable=False))",
            )
        if any(inner.type in ASSIGNS for inner in operations_within([operation])):
            _refuse(
                layer,
                f"draws random numbers or assigns to a variable in a tf.function "
                f"({operation.name}), and would do so once more when it is computed "
                "again",
                "Do that outside of the tf.function",
            )


def refuse_other_draws(layer: keras.layers.Layer, draws: str) -> None:
    """Refuses a layer that would draw other numbers; `draws`: its `other_draws`."""
    if draws:
        _refuse(
            layer,
            f"draws random numbers by TensorFlow ({draws}), and would draw others "
            "when it is computed again",
            "Draw by keras.random",
        )


def other_draws(operations: Sequence[tf.Operation]) -> str:
    """The kind of one that draws numbers which nobody can have again; "": none."""
    made = operations_within(operations)
    return next((str(op.type) for op in made if op.type in DRAWS), "")


def _refuse(layer: keras.layers.Layer, why: str, instead: str = "") -> NoReturn:
    """Says what a layer does, and what it might do instead, and what to do."""
    way = f"{instead}, or leave" if instead else "Leave"
    raise ConfigurationError(
        f"The layer {layer.name!r} {why}. {way} it out: "
        "tfdp.remat(model, policy=lambda layer: layer is not ...)."
    )


# The random numbers of a layer, drawn once more as they were.


# What a generator's `next` is for the time being.
Draw = Callable[[bool], Any]


class RandomDraws:
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
        """While this lasts every draw is noted."""
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
        """While this lasts every draw gives what it gave before, in the same order."""
        left = iter(self._drawn)

        def replayed(plain: Draw) -> Draw:
            return lambda ordered: next(left)

        with self._drawing(replayed):
            yield

    @contextlib.contextmanager
    def _drawing(self, led: Callable[[Draw], Draw]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for generator in self._generators:
                stack.enter_context(_method_overrides.leading(generator, led))
            stack.enter_context(drawing_globally(led))
            yield


class _Leads:
    """What draws in the place of generators, in each thread by itself.

    Eager replicas are threads that take turns at their exchanges, so that one of them
    may begin a block, and end it, while another one is in the middle of it.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._users: dict[int, int] = defaultdict(int)

    @contextlib.contextmanager
    def leading(self, generator: Any, led: Callable[[Draw], Draw]) -> Iterator[None]:
        """While this lasts `generator` draws in this thread as `led` says.

        Of a block within a block: on top of what the outer one leads it with.
        """
        key, own = id(generator), self._of_this_thread()
        outer = own.get(key)
        own[key] = led(outer or _plain(generator))
        self._use(generator, 1)
        try:
            yield
        finally:
            self._use(generator, -1)
            if outer is None:
                del own[key]
            else:
                own[key] = outer

    def _of_this_thread(self) -> dict[int, Draw]:
        found: dict[int, Draw] = vars(self._of_thread).setdefault("led", {})
        return found

    def _use(self, generator: Any, change: int) -> None:
        with self._lock:
            self._users[id(generator)] += change
            if not self._users[id(generator)]:
                del self._users[id(generator)]
                vars(generator).pop("next")
            elif change > 0:
                # Not by setattr: Keras' objects track what is set on them.
                vars(generator)["next"] = self._next_of(generator)

    def _next_of(self, generator: Any) -> Callable:
        def draw(ordered: bool = True) -> Any:
            led = self._of_this_thread().get(id(generator))
            return (led or _plain(generator))(ordered)

        return draw


_method_overrides = _Leads()


def _plain(generator: Any) -> Draw:
    return lambda ordered: type(generator).next(generator, ordered)
