"""Reads the squared norms that `tfdp.chain.norms` records in each step."""

from __future__ import annotations

import keras

from tfdp.chain.norms import NoiseProbe
from tfdp.plan.noise_scale import NormsOfStep
from tfdp.step.observers import attach, detach, observers_of


class NormsReader:
    """Reads the squared norms of the gradients of each step of one `fit`."""

    def __init__(self, model: keras.Model):
        self._model = model
        probes = observers_of(model, NoiseProbe)
        if not probes:
            replicas = len(model.distribute_strategy.extended.worker_devices)
            optimizer, steps = model.optimizer, model.steps_per_execution
            probes = [NoiseProbe(optimizer, model.trainable_variables, replicas, steps)]
            attach(model, probes[0])
        self._probe = probes[0]
        self._probe.readers += 1
        self.skip()

    def skip(self) -> None:
        """Skips the steps so far: those of another `fit` of the model."""
        self._read = self._probe.steps

    def read(self) -> list[NormsOfStep]:
        steps = range(self._read, self._probe.steps)
        self._read = steps.stop
        return self._probe.norms(steps)

    def close(self) -> None:
        """Stops reading; the last reader detaches the probe."""
        self._probe.readers -= 1
        if not self._probe.readers:
            detach(self._model, self._probe)
