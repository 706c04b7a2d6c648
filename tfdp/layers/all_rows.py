"""A layer that sees the rows of all replicas."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from tfdp._private.keras_models import mask_of, put_mask
from tfdp.checks import what_it_is
from tfdp.errors import ConfigurationError
from tfdp.losses import all_rows, own_rows
from tfdp.tracing.step import current_step


@keras.saving.register_keras_serializable("tfdp")
class AllRows(keras.layers.Wrapper):
    """Computes a layer on the rows of all replicas, and returns this replica's.

        y_r = f(x_0, x_1, ... x_(R-1))_r    x_r, y_r: rows of replica r; f: the layer

    For layers whose rows see each other: `BatchNormalization`, attention between rows,
    the load balance of a mixture, a queue of features. The result, its gradients, which
    travel to the rows' owners, and what the layer stores are one device's on the whole
    batch. For batch normalization alone, `SyncBatchNormalization` sends statistics
    instead of rows. Losses and metrics: `tfdp.losses.on_all_rows`.

    Args:
      layer: the layer, or model, to compute. It takes one argument, a tensor or a
        structure of dense tensors with a row for each sample, and returns such.
      **options: those of `keras.layers.Layer`.

    Shapes: those of the layer. Outside of replicas, on one replica and under the
    default strategy it is the layer itself; files of the model are read without tfdp's
    replicas.

    Raises:
      ConfigurationError: for a layer that needs several arguments; for tensors without
        rows; for one that reads rows of a replica from elsewhere than its argument, or
        a metric; and where replicas cannot exchange: with `jit_compile=True`, on TPUs,
        on padded batches, in a `tf.function`, a branch or a loop of a step.

    Cost: each replica receives the other replicas' rows, and computes the layer on all
    of them, R times its own part; the gradient sends as many bytes back.

    ```python
    import keras
    import tfdp

    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(8),
        tfdp.layers.AllRows(keras.layers.BatchNormalization()),
        keras.layers.Dense(1),
    ])
    model.compile("sgd", "mse", jit_compile=False)
    ```

    Source: T. Chen et al., 2020 (SimCLR), section 2.2, normalizes over all devices.
    """

    def __init__(self, layer: keras.layers.Layer, **options: Any):
        _refuse_arguments(layer)
        super().__init__(layer, **options)
        self.supports_masking = layer.supports_masking

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        takes_training = "training" in inspect.signature(self.layer.call).parameters
        options = {"training": training} if takes_training else {}
        found = current_step()
        if found is None or found[0].replicas == 1 or found[0].here.sees_all_rows:
            return self.layer(inputs, **options)
        here = found[0].here
        own = [x for x in keras.tree.flatten(inputs) if here.may_have_rows(x)]
        if not own:
            return self.layer(inputs, **options)
        wholes = keras.tree.map_structure(
            lambda x: _whole(x) if here.may_have_rows(x) else x, inputs
        )
        with here.seeing_all_rows():
            outputs = self.layer(wholes, **options)
        for output in keras.tree.flatten(outputs):
            here.refuse_own(output, f"The layer {self.layer.name!r}")
        like = own[0]
        return keras.tree.map_structure(lambda whole: _own(whole, like), outputs)

    def build(self, input_shape: Any = None) -> None:
        # A layer without `build` makes what it holds when it is called.
        if self._defines("build"):
            super().build(input_shape)

    def _defines(self, method: str) -> bool:
        return getattr(type(self.layer), method) is not getattr(keras.Layer, method)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        tells = ("compute_output_shape", "compute_output_spec")
        if self.layer.built and any(map(self._defines, tells)):
            return self.layer.compute_output_spec(inputs)
        # By a call of the layer, as Keras does for such a layer alone.
        masks = keras.tree.map_structure(mask_of, inputs)
        return _Called(self, name=self.name).compute_output_spec(
            inputs, masks, training=training
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        return self.layer.compute_output_shape(input_shape)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return self.layer.compute_mask(inputs, previous_mask)


class _Called(keras.Operation):
    """A call on tensors without rows, which Keras gives no masks."""

    def __init__(self, layer: keras.layers.Layer, name: str):
        super().__init__(name=name)
        self._layer = layer

    def call(self, inputs: Any, masks: Any, training: bool | None = None) -> Any:
        pairs = zip(keras.tree.flatten(inputs), keras.tree.flatten(masks), strict=True)
        for tensor, mask in pairs:
            if mask is not None:
                put_mask(tensor, mask)
        return self._layer.call(inputs, training=training)


def _whole(own: Any) -> Any:
    whole, mask = all_rows(own), mask_of(own)
    if mask is not None:
        put_mask(whole, all_rows(mask))
    return whole


def _own(whole: Any, like: Any) -> Any:
    own, mask = own_rows(whole, like), mask_of(whole)
    if mask is not None:
        put_mask(own, own_rows(mask, like))
    return own


def _refuse_arguments(layer: Any) -> None:
    if not isinstance(layer, keras.layers.Layer):
        raise ConfigurationError(
            f"tfdp.layers.AllRows takes a Keras layer. Received: {what_it_is(layer)}."
        )
    parameters = [*inspect.signature(layer.call).parameters.values()]
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(needed) > 1:
        raise ConfigurationError(
            f"tfdp.layers.AllRows calls its layer with one argument, and "
            f"{type(layer).__name__} needs {', '.join(needed)}. Give it a layer of "
            "your own that takes one structure of tensors and calls that one."
        )
