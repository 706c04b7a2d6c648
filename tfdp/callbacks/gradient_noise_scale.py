"""`GradientNoiseScale`: the batch size beyond which larger batches stop to pay."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdp._private.optimizer_hooks import momentum_compression_of
from tfdp.callbacks.other_callbacks import Logs
from tfdp.checks import is_number
from tfdp.errors import ConfigurationError
from tfdp.plan.noise_scale import NoiseAverage, NoiseEstimate, NormsOfStep, split_norms
from tfdp.step.find_optimizers import (
    innermost_optimizers,
    optimizers_of,
    optimizers_with_sync,
)
from tfdp.step.norms_reader import NormsReader
from tfdp.strategies.gather_from_hosts import refuse_without_graphs
from tfdp.variables.in_shards import updates_of

# (1 + decay) / (1 - decay), the number of steps that count, is `FEWEST_STEPS` here.
LEAST_DECAY = 0.5


class GradientNoiseScale(keras.callbacks.Callback):
    """Estimates the gradient noise scale, in rows, while `fit` trains on replicas.

    With the gradient G of all data and the covariance C of the gradients of single rows

        B_simple = tr(C) / |G|^2

    With B rows training takes about (1 + B_simple / B) times the fewest steps and (1 +
    B / B_simple) times the fewest rows. Every step has gradients of two batch sizes, of
    single replicas and of their sum, which determine both unknowns without bias, for
    unequal parts too (`tfdp.plan.noise_scale`). Numerator and denominator are averaged
    over steps, and then divided.

    Adds `gradient_noise_scale` to the logs of each epoch, the same on all workers:
    infinite if no gradient exceeds the noise, absent before three steps. `estimate`
    holds it with its 95% interval, and `summary()` explains it. Skips steps with
    non-finite norms (from loss scaling) and steps in which only one replica has rows.

    Norms are of the gradient of the loss: without loss scale, clipping and decoupled
    weight decay. A row is one of the batch, such as a whole masked sequence. The
    interval takes steps as independent draws; the noise scale often grows tenfold
    during training: see `decay`. B_simple is the critical batch size of plain gradient
    descent on an isotropic loss; in practice, its order of magnitude. Layers that mix
    the rows of replicas (`SyncBatchNormalization`) bias the estimate.

    Args:
      decay: of a step's weight with every later step, above 0.5, at most 1. 0.99: about
        the last 200 steps count, (1 + decay) / (1 - decay). 1: equal weights.

    Raises:
      ConfigurationError: `decay` is not as above; when training starts: on one replica,
        under a strategy that is not tfdp's or of a TPU, with `shard=`, gradient
        accumulation, or `run_eagerly=True`; in a step with two updates.

    Cost: two passes over each replica's gradients, and two numbers in the first bucket
    (with `wire_dtype`, in a separate exchange), which then waits for all gradients:
    exchanges overlap less with backprop. The training step is retraced when training
    begins and after it ends; Keras waits for each batch before it starts the next.

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
    Differs from the paper: parts may have different numbers of rows; the interval.
    """

    def __init__(self, decay: float = 0.99):
        super().__init__()
        if not is_number(decay) or not LEAST_DECAY < decay <= 1:
            raise ConfigurationError(
                f"decay must be a number above {LEAST_DECAY}, at most 1, so that at "
                f"least three steps count. Received: {decay!r}."
            )
        self.decay = float(decay)
        #: The newest estimate; None before three steps.
        self.estimate: NoiseEstimate | None = None
        #: Steps skipped so far.
        self.skipped_steps = 0
        self._average = NoiseAverage(self.decay)
        self._reader: NormsReader | None = None
        # Totals over steps, of batches and of their parts.
        self._steps, self._rows, self._part_rows = 0, 0.0, 0.0

    def on_train_begin(self, logs: Logs = None) -> None:
        _check_can_measure(self.model, type(self).__name__)
        self._reader = NormsReader(self.model)
        self.model.make_train_function(force=True)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Skips what ran since the last batch: another callback's `fit`."""
        if self._reader is not None:
            self._reader.skip()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._reader is not None:
            for norms in self._reader.read():
                self.add_step(norms)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.estimate = self._average.estimate()
        if logs is not None and self.estimate is not None:
            logs["gradient_noise_scale"] = self.estimate.noise_scale

    def on_train_end(self, logs: Logs = None) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self.model.make_train_function(force=True)

    def state_to_keep(self) -> dict[str, Any]:
        """The state for `Checkpoint`."""
        numbers = [self.skipped_steps, self._steps, self._rows, self._part_rows]
        return {"numbers": numbers, "sums": self._average.sums}

    def take_back(self, state: dict[str, Any]) -> None:
        skipped, steps, self._rows, self._part_rows = state["numbers"]
        self.skipped_steps, self._steps = int(skipped), int(steps)
        self._average.sums = state["sums"]
        self.estimate = self._average.estimate()

    def summary(self) -> str:
        """The estimate with its interval, and advice on the batch size, as text."""
        estimate = self.estimate
        if estimate is None:
            return (
                "gradient noise scale: not available before three steps "
                f"({self.skipped_steps} skipped)"
            )
        rows, part_rows = self._rows / self._steps, self._part_rows / self._steps
        if math.isinf(estimate.noise_scale):
            advice = (
                "No gradient exceeds the noise: raise decay, or use larger batches."
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
            f"({self.skipped_steps} skipped). {advice}"
        )

    def add_step(self, norms: NormsOfStep) -> None:
        """Adds the norms of one step."""
        if norms.parts < 2 or not all(map(math.isfinite, norms)):
            self.skipped_steps += 1
            return
        self._average.add(*split_norms(*norms))
        self._steps += 1
        self._rows += norms.rows
        self._part_rows += norms.rows / norms.parts


def _check_can_measure(model: keras.Model, name: str) -> None:
    strategy, optimizer = model.distribute_strategy, model.optimizer
    refuse_without_graphs(model, name)
    why = None
    if strategy.extended.reducer.transport.replicas == 1:
        why = (
            "compares the gradients of single replicas with their sum, but there is "
            "one replica. Train on several: tfdp.use_virtual_devices(2) splits a CPU"
        )
    elif not updates_of(optimizer).has_whole_sums:
        option = without = "tfdp.pipeline"
        if strategy.given.has("layout"):
            option = without = "layout="
        elif strategy.given.has("shard"):
            option, without = f"shard={strategy.given['shard']!r}", "shard="
        why = (
            f"needs whole sums of gradients, but with {option} each replica has a "
            f"part of them. Estimate without {without}, on a smaller model"
        )
    elif getattr(optimizer, "accumulate_steps", 1) > 1 or any(
        leaf.gradient_accumulation_steps for leaf in innermost_optimizers(optimizer)
    ):
        why = (
            "measures the gradients of one batch, but this optimizer accumulates "
            "several. Estimate without accumulation: the noise scale is the same"
        )
    elif strategy.extended.reducer.compressed is not None:
        why = (
            "needs whole sums of gradients, but Communication(compression=...) changes "
            "them. Estimate without compression: the noise scale is the same"
        )
    elif momentum_compression_of(optimizer) is not None:
        why = (
            "needs whole sums of gradients, but this optimizer exchanges compressed "
            "momentum. Estimate with keras.optimizers.Adam"
        )
    elif optimizers_with_sync(optimizers_of(model), strategy):
        why = (
            "needs the sum of all replicas' gradients in each step, and with sync=... "
            "it comes later, or there is none. Estimate without sync: the noise scale "
            "is the same"
        )
    if why is not None:
        raise ConfigurationError(f"{name} {why}, or remove it.")
