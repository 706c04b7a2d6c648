"""`GradientNoiseScale`: from which batch size on larger batches stop to pay."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdp.checks import is_number
from tfdp.errors import ConfigurationError
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.plan.noise_scale import NoiseAverage, NoiseEstimate, split_norms
from tfdp.step.compression import momentum_compression_of
from tfdp.step.observers import NormsOfStep, NormsReader

# Where (1 + decay) / (1 - decay), as many steps as count, is `FEWEST_STEPS`.
LEAST_DECAY = 0.5


class GradientNoiseScale(keras.callbacks.Callback):
    """Estimates the gradient noise scale, in rows, while `fit` trains on replicas.

    With the gradient G of all data and the covariance S of the gradients of single rows

        B_simple = tr(S) / |G|^2

    Batches well below it waste no rows, batches well above it save no steps: with B
    rows training takes about (1 + B_simple / B) times the fewest steps and (1 + B /
    B_simple) times the fewest rows. Every step has gradients of two batch sizes, those
    of single replicas and their sum, which tell both unknowns without bias, of unequal
    parts, too (`tfdp.plan.noise_scale`). Numerator and denominator are averaged over
    steps, and then divided.

    Adds `gradient_noise_scale` to the logs of each epoch, the same number on all
    workers: infinite where no gradient stands out from the noise, and left out while
    there are fewer than three steps. `estimate` holds it with its 95% interval, and
    `summary()` says it in words. Steps whose norms are not finite (loss scaling finds
    them), and those in which one replica alone has rows, are left out.

    Norms are those of the gradient of the loss: without loss scale, before clipping and
    without decoupled weight decay. A row is one of the batch: of masked sequences, a
    sequence. The interval takes steps as independent draws and holds the spread among
    them, not that the noise scale grows in the course of training, often tenfold: see
    `decay`. B_simple is the critical batch size of plain gradient descent on a loss
    that is alike curved in all directions; in practice it tells its order of magnitude.
    Layers that mix the rows of several replicas (`SyncBatchNormalization`) make their
    gradients dependent, and the estimate wrong by as much.

    Args:
      decay: of the weight of a step with every later one, above 0.5, at most 1. 0.99:
        about the last 200 steps count, (1 + decay) / (1 - decay); of fewer than three
        there is no spread. 1: all that this callback has seen weigh the same.

    Raises:
      ConfigurationError: when `decay` is not as above; when training starts: on one
        replica, which has no smaller batch to compare with, under a strategy that is
        not tfdp's or of a TPU, with `shard=`, where no replica has the whole sum, with
        gradient accumulation, and with `run_eagerly=True`; in the first step: with two
        updates in one step.

    Cost: two passes over the gradients of each replica, and two numbers more in the
    first bucket (with `wire_dtype`, in an exchange of their own), which waits for all
    gradients then: exchanges hide less behind backprop. The training step is traced
    once more, when training begins and after it has ended; Keras waits for each batch
    before it starts the next. Nothing in a `fit` without it.

    ```python
    import keras
    import numpy as np
    import tfdp

    tfdp.use_virtual_devices(2)
    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(640, 4)).astype("float32")
    y = x[:, :1] + generator.normal(size=(640, 1))
    noise = tfdp.callbacks.GradientNoiseScale()
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[noise])
    print(noise.summary())
    ```

    Source: S. McCandlish et al., 2018, arXiv 1812.06162, section 2.2 and appendix A.1.

    Differs from the paper: the parts may have different numbers of rows; the interval.
    """

    def __init__(self, decay: float = 0.99):
        super().__init__()
        if not is_number(decay) or not LEAST_DECAY < decay <= 1:
            raise ConfigurationError(
                f"decay must be a number above {LEAST_DECAY}, at most 1: else fewer "
                f"than three steps count, which tell no noise. Received: {decay!r}."
            )
        self.decay = float(decay)
        #: The newest estimate; None before there are three steps.
        self.estimate: NoiseEstimate | None = None
        #: Steps that were left out so far.
        self.skipped_steps = 0
        self._average = NoiseAverage(self.decay)
        self._reader: NormsReader | None = None
        # Sums over steps, of what a batch and one of its parts had.
        self._steps, self._rows, self._part_rows = 0, 0.0, 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to look at gradients: in graphs, which are therefore built anew.

        Raises:
          ConfigurationError: where they cannot tell.
        """
        _check_can_measure(self.model, type(self).__name__)
        self._reader = NormsReader(self.model)
        self.model.make_train_function(force=True)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Leaves out what came since the last batch: another callback's `fit`."""
        if self._reader is not None:
            self._reader.skip()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Takes in the steps that have run."""
        if self._reader is not None:
            for norms in self._reader.read():
                self.take_in(norms)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the estimate to the logs."""
        self.estimate = self._average.estimate()
        if logs is not None and self.estimate is not None:
            logs["gradient_noise_scale"] = self.estimate.noise_scale

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Looks no more; the next training builds graphs that do not, either."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self.model.make_train_function(force=True)

    def state_to_keep(self) -> dict[str, Any]:
        """What a checkpoint of the training keeps: all that the steps have told."""
        numbers = [self.skipped_steps, self._steps, self._rows, self._part_rows]
        return {"numbers": numbers, "sums": self._average.sums}

    def take_back(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        skipped, steps, self._rows, self._part_rows = state["numbers"]
        self.skipped_steps, self._steps = int(skipped), int(steps)
        self._average.sums = state["sums"]
        self.estimate = self._average.estimate()

    def summary(self) -> str:
        """The estimate in words, with its interval, and what it says of the batch."""
        estimate = self.estimate
        if estimate is None:
            return (
                "gradient noise scale: not known, from fewer than three steps "
                f"({self.skipped_steps} left out)"
            )
        rows, part_rows = self._rows / self._steps, self._part_rows / self._steps
        if math.isinf(estimate.noise_scale):
            advice = (
                "No gradient stands out from the noise: look over more steps (decay), "
                "or train in larger batches."
            )
        else:
            ratio = estimate.noise_scale / rows
            fewest_rows = f"{1 + 1 / ratio:.3g}" if ratio else "many"
            advice = (
                f"In batches of {rows:.4g} rows training takes about {1 + ratio:.3g} "
                f"times the fewest steps and {fewest_rows} times the fewest rows."
            )
        return (
            f"gradient noise scale: {estimate.noise_scale:.4g} rows (95%: "
            f"{estimate.low:.4g} to {estimate.high:.4g}), from about "
            f"{estimate.steps:.0f} steps with parts of {part_rows:.4g} rows "
            f"({self.skipped_steps} left out). {advice}"
        )

    def take_in(self, norms: NormsOfStep) -> None:
        """Learns from one step that has run."""
        if norms.parts < 2 or not all(map(math.isfinite, norms)):
            self.skipped_steps += 1
            return
        self._average.add(*split_norms(*norms))
        self._steps += 1
        self._rows += norms.rows
        self._part_rows += norms.rows / norms.parts


def _check_can_measure(model: keras.Model, name: str) -> None:
    strategy, optimizer = model.distribute_strategy, model.optimizer
    pipeline = getattr(strategy.extended, "reducer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    leaves = getattr(inner, "optimizers", None) or [inner]
    why = None
    if not isinstance(pipeline, GradientPipeline):
        why = (
            f"needs the gradients of replicas, and {type(strategy).__name__} does not "
            "show them. Make the model under tfdp.DataParallelStrategy or "
            "tfdp.MultiHostDataParallelStrategy"
        )
    elif pipeline.engine.replicas == 1:
        why = (
            "compares the gradients of single replicas with their sum, and there is "
            "one replica. Train on several: tfdp.use_virtual_devices(2) makes two of a "
            "CPU"
        )
    elif strategy.shard != "none":
        why = (
            f"needs whole sums of gradients, and with shard={strategy.shard!r} each "
            "replica has its part of them. Estimate without shard, on a smaller model "
            "or for a few steps"
        )
    elif getattr(optimizer, "accumulate_steps", 1) > 1 or any(
        leaf.gradient_accumulation_steps for leaf in leaves
    ):
        why = (
            "looks at the gradients of one batch, and this optimizer accumulates those "
            "of several. Estimate without accumulation: the noise scale of the rows is "
            "the same"
        )
    elif getattr(strategy.extended.reducer, "compressed", None) is not None:
        why = (
            "needs whole sums of gradients, and Communication(compression=...) makes "
            "others of them. Estimate without compression: the noise scale is the same"
        )
    elif momentum_compression_of(optimizer) is not None:
        why = (
            "needs whole sums of gradients, and this optimizer sends its momentum in "
            "fewer bits. Estimate without it, with keras.optimizers.Adam"
        )
    elif getattr(optimizer, "sync", None) is not None:
        why = (
            "needs the sums of all replicas' gradients, and with sync=... each trains "
            "apart. Estimate without sync: the noise scale is the same"
        )
    elif model.run_eagerly:
        why = "looks at gradients in graphs. Compile with run_eagerly=False"
    if why is not None:
        raise ConfigurationError(f"{name} {why}, or leave it out.")
