"""One model in training: built, set to given values, trained through `fit`, read."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.step.find_optimizers import optimizers_of
from tfdp.tools.testing.batches import Batch, as_dataset
from tfdp.tools.testing.model_parts import random_layers, switch_off_random_layers

# Changes a model that was just built; told how many replicas it will have.
ModelChange = Callable[[keras.Model, int], None]
# Gets the step, from 1, and per weight the arrays of its replicas.
OnStep = Callable[[int, list[list[np.ndarray]]], None]


@dataclasses.dataclass
class Trainee:
    """A model that can be trained again and again from the same start.

    Args:
      build: makes a compiled model; called under the strategy's scope.
      strategy: None: on one device.
      device: the one device, where `strategy` is None.
      seed: for everything that is drawn while building.
      keep_random_layers: leave dropout and noise as they are.
      changes: made to each model that was built.
    """

    build: Callable[[], keras.Model]
    strategy: tf.distribute.Strategy | None
    device: str
    seed: int
    keep_random_layers: bool = False
    changes: Sequence[ModelChange] = ()
    jit_compile: bool | None = None

    def make(self, first_batch: Batch) -> None:
        """Builds the model, its variables and those of its optimizers.

        Raises:
          ConfigurationError: when `build` does not return a compiled, built model.
        """
        keras.utils.set_random_seed(self.seed)
        with self._placed():
            self.model = _checked(self.build())
            self.switched_off: list[str] = []
            if not self.keep_random_layers:
                self.switched_off = switch_off_random_layers(self.model)
            for change in self.changes:
                change(self.model, self.replicas)
            _build_variables(self.model, first_batch)
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
        if self.jit_compile is not None:
            self.model.jit_compile = self.jit_compile
        self._first_batch = first_batch
        self._made_variables = len(self._state())

    @property
    def replicas(self) -> int:
        """The number of replicas, 1 on one device."""
        return 1 if self.strategy is None else self.strategy.num_replicas_in_sync

    def values(self) -> list[np.ndarray]:
        """Everything that training changes: weights, random states, optimizer slots."""
        return [variable.numpy() for variable in self._state()]

    def load(self, values: Sequence[np.ndarray], *, rates: bool = True) -> None:
        """Sets what `values` gave, also of another trainee.

        Args:
          values: as `values` gives them.
          rates: whether learning rates are set as well.

        Raises:
          ConfigurationError: when they do not fit: `build` made another model.
        """
        if len(self._state()) > self._made_variables:
            # Training has made variables of its own, which only a new model is without.
            self.make(self._first_batch)
        state = self._state()
        shapes = [tuple(variable.shape) for variable in state]
        if shapes != [value.shape for value in values]:
            raise ConfigurationError(
                "build() made models with different variables when it was called "
                f"twice: of shapes {shapes} and {[value.shape for value in values]}."
            )
        with self._placed():
            for variable, value in zip(state, values, strict=True):
                if rates or variable.name != "learning_rate":
                    variable.assign(value)

    def train(self, batches: Sequence[Batch], on_step: OnStep) -> float | None:
        """Takes one step per batch; the loss that `fit` reports."""
        watch = _Watch(self._read_weights, len(batches), on_step)
        with self._device():
            history = self.model.fit(
                as_dataset(batches),
                epochs=1,
                shuffle=False,
                verbose=0,
                callbacks=[watch],
            )
        losses = history.history.get("loss")
        return float(losses[-1]) if losses else None

    def random_states(self) -> dict[str, list[np.ndarray]]:
        """Layer name -> the states of its random generators."""
        states: dict[str, list[np.ndarray]] = {}
        for layer, generator in random_layers(self.model):
            states.setdefault(layer.name, []).append(generator.state.numpy())
        return states

    def _state(self) -> list[keras.Variable]:
        found = list(self.model.variables)
        for optimizer in optimizers_of(self.model):
            found += optimizer.variables
        unique = {id(variable): variable for variable in found}
        return list(unique.values())

    def _read_weights(self) -> list[list[np.ndarray]]:
        return [self._copies(weight) for weight in self.model.weights]

    def _copies(self, weight: keras.Variable) -> list[np.ndarray]:
        """The weight on each replica; one array where it has no copies to compare."""
        value = weight.value
        synchronization = getattr(value, "synchronization", None)
        if (
            self.strategy is None
            or synchronization == tf.VariableSynchronization.ON_READ
        ):
            return [weight.numpy()]
        copies = [
            copy.numpy()
            for copy in self.strategy.experimental_local_results(value)
            if tuple(copy.shape) == tuple(weight.shape)  # not a shard
        ]
        return copies or [weight.numpy()]

    @contextlib.contextmanager
    def _placed(self) -> Any:
        with self._device():
            with self.strategy.scope() if self.strategy else contextlib.nullcontext():
                yield

    def _device(self) -> Any:
        if self.strategy is None:
            return tf.device(self.device)
        return contextlib.nullcontext()


class _Watch(keras.callbacks.Callback):
    """Reads the weights after every step that `fit` tells of."""

    def __init__(self, read: Callable[[], Any], steps: int, on_step: OnStep):
        super().__init__()
        self._read, self._steps, self._on_step = read, steps, on_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution the last execution may reach past the data.
        self._on_step(min(int(batch) + 1, self._steps), self._read())


def _checked(model: Any) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            "build() must return a compiled keras.Model. It returned: "
            f"{type(model).__name__}."
        )
    if not model.compiled or model.optimizer is None:
        raise ConfigurationError(
            f"build() must return a compiled model. Model {model.name!r} was not "
            "compiled: call model.compile(optimizer=..., loss=...) in build()."
        )
    return model


def _build_variables(model: keras.Model, batch: Batch) -> None:
    if model.built:
        return
    inputs = batch[0] if isinstance(batch, tuple) else batch
    try:
        model(inputs)
    except Exception as error:
        raise ConfigurationError(
            f"Model {model.name!r} has no weights yet, and calling it on the first "
            f"batch to make them failed: {type(error).__name__}: {error}. Call "
            "model.build(input_shape), or the model on a batch, in build()."
        ) from error
