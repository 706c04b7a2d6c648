"""A model that can be built, set to given values, trained by `fit`, and read."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import DistributedOptimizer
from tfdp.errors import ConfigurationError
from tfdp.step.find_optimizers import optimizers_of, optimizers_with_sync
from tfdp.tools.testing.alike_draws import alike_draws
from tfdp.tools.testing.batches import Batch, as_dataset, period_of
from tfdp.tools.testing.model_parts import (
    layers_of,
    random_layers,
    switch_off_random_layers,
)

# (new model, number of replicas): modifies the model.
ModelChange = Callable[[keras.Model, int], None]
# (step from 1, for each weight the arrays of its replicas).
OnStep = Callable[[int, list[list[np.ndarray]]], None]


@dataclasses.dataclass(frozen=True)
class CheckedTraining:
    """A model to train, its data, and the strategy."""

    build: Callable[[], keras.Model]
    strategy: tf.distribute.Strategy
    batches: tuple[Batch, ...]
    seed: int
    keep_random_layers: bool = False
    changes: tuple[ModelChange, ...] = ()

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync


@dataclasses.dataclass
class Trainee:
    """A model that can be trained repeatedly from the same start."""

    setting: CheckedTraining
    strategy: tf.distribute.Strategy | None  # None: on one device
    jit_compile: bool | None = None
    has_drawn: bool = False  # numbers that repeat after `period` rows

    @property
    def period(self) -> int:
        """The rows after which draws repeat: each replica has whole periods."""
        return period_of(self.setting.batches, self.setting.replicas)

    def make(self) -> None:
        """Builds the model, its variables and those of its optimizers."""
        keras.utils.set_random_seed(self.setting.seed)
        with self._placed():
            self.model = _checked(self.setting.build(), self.setting.strategy)
            self.switched_off: list[str] = []
            if not self.setting.keep_random_layers:
                self.switched_off = switch_off_random_layers(self.model)
            for change in self.setting.changes:
                change(self.model, self.replicas)
            _build_variables(self.model, self.setting.batches[0])
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
        if self.jit_compile is not None:
            self.model.jit_compile = self.jit_compile
        self._made_variables = len(self._state())

    @property
    def replicas(self) -> int:
        return 1 if self.strategy is None else self.strategy.num_replicas_in_sync

    def values(self) -> list[np.ndarray]:
        """All state of training: weights, random states, optimizer slots."""
        return [variable.numpy() for variable in self._state()]

    def load(self, values: Sequence[np.ndarray], *, rates: bool = True) -> None:
        """Restores `values()` of any trainee; learning rates only with `rates`."""
        if len(self._state()) > self._made_variables:
            # Training created variables, which only a new model lacks.
            self.make()
        state = self._state()
        shapes = [tuple(variable.shape) for variable in state]
        if shapes != [value.shape for value in values]:
            raise ConfigurationError(
                "build() made models with different variables in two calls, of shapes "
                f"{shapes} and {[value.shape for value in values]}."
            )
        with self._placed():
            for variable, value in zip(state, values, strict=True):
                if rates or variable.name != "learning_rate":
                    variable.assign(value)

    def train(self, batches: Sequence[Batch], on_step: OnStep) -> float | None:
        """Runs one step per batch; returns the loss that `fit` reports."""
        # With steps_per_execution the last execution may exceed the data.
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: on_step(
                min(int(batch) + 1, len(batches)),
                [self._copies(weight) for weight in self.model.weights],
            )
        )
        keeps = self.setting.keep_random_layers
        drawing = contextlib.nullcontext() if keeps else alike_draws(self.period)
        with drawing as draws, self._device():
            dataset = as_dataset(batches)
            history = self.model.fit(
                dataset, epochs=1, shuffle=False, verbose=0, callbacks=[watch]
            )
        self.has_drawn |= draws is not None and draws.has_drawn
        losses = history.history.get("loss")
        return float(losses[-1]) if losses else None

    def gradient_change(self) -> tuple[str, str]:
        """How the step changes gradients, by its analysis, and what to do instead."""
        found = getattr(self.strategy, "suspicions", {}).get(self.model)
        change, _, advice = (found["changed"] if found else "").rpartition(". ")
        return change[:1].upper() + change[1:], advice

    def random_states(self) -> dict[str, list[np.ndarray]]:
        """The states of random layers, by layer name."""
        states: dict[str, list[np.ndarray]] = {}
        for layer, generator in random_layers(self.model):
            states.setdefault(layer.name, []).append(generator.state.numpy())
        return states

    def _state(self) -> list[keras.Variable]:
        found = list(self.model.variables)
        for optimizer in optimizers_of(self.model):
            found += optimizer.variables
        return list({id(variable): variable for variable in found}.values())

    def _copies(self, weight: keras.Variable) -> list[np.ndarray]:
        """The weight on each replica; one array if it is not replicated."""
        copies = []
        on_read = tf.VariableSynchronization.ON_READ
        is_on_read = getattr(weight.value, "synchronization", None) == on_read
        if self.strategy is not None and not is_on_read:
            copies = [
                copy.numpy()
                for copy in self.strategy.experimental_local_results(weight.value)
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
            return tf.device(self.setting.strategy.extended.worker_devices[0])
        return contextlib.nullcontext()


def _checked(model: Any, strategy: tf.distribute.Strategy) -> keras.Model:
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
    for optimizer in optimizers_with_sync(optimizers_of(model), strategy):
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has sync={optimizer.sync!r}. With that "
            "replicas or hosts train independently, and by design the result is not "
            "that of one device. Check the model without sync."
        )
    for optimizer in optimizers_of(model):
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.sync = None  # has no effect under the strategy
    return model


def _build_variables(model: keras.Model, batch: Batch) -> None:
    parts = layers_of(model)[1:]
    # Of a model with its own train_step, call may take something else than a batch.
    if model.built or (parts and all(layer.built for layer in parts)):
        return
    inputs = batch[0] if isinstance(batch, tuple) else batch
    try:
        model(inputs)
    except Exception as error:
        raise ConfigurationError(
            f"Model {model.name!r} has no weights yet, and calling it on the first "
            f"batch to make them failed: {type(error).__name__}: {error}. Call "
            "model.build(input_shape), or the model on a batch, where it is made: in "
            "build(), or in a script within the strategy's scope, before fit."
        ) from error
