"""Late updates on one device: gradients of replicas' rows one by one, updates later."""

import numpy as np
import tensorflow as tf


class LateReference:
    """w_(t+1) = w_t - opt(g_(t-d)(w_(t-d))) with a Keras optimizer; the state of layers
    is that of the step whose gradients are applied, the mean over rows.

    Args:
      model: not under a strategy.
      optimizer: makes the updates.
      take: given the number of gradients that wait, how many to apply now.
      scales: whether a gradient that is not finite is skipped.
    """

    def __init__(self, model, optimizer, take, scales=False):
        self.model, self.optimizer, self.take = model, optimizer, take
        self.scales, self.skipped, self.waiting = scales, 0, []
        optimizer.build(model.trainable_variables)

    def step(self, micro_steps):
        """One update's worth of micro-steps, each with the (x, y) of each replica."""
        weights = self.model.trainable_variables
        totals, rows = [np.zeros(w.shape, "float64") for w in weights], 0
        state = self.model.non_trainable_variables
        start = [v.numpy() for v in state]
        now = start
        for parts in micro_steps:
            changes, counted = [np.zeros(v.shape) for v in state], 0
            for x, y in parts:
                if not len(x):
                    continue
                for variable, value in zip(state, now, strict=True):
                    variable.assign(value)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self.model(x, training=True) - y) ** 2)
                gradients = tape.gradient(loss, weights)
                for total, gradient in zip(totals, gradients, strict=True):
                    total += len(x) * gradient.numpy()
                for change, variable, value in zip(changes, state, now, strict=True):
                    change += len(x) * (variable.numpy() - value)
                counted += len(x)
            now = [v + c / counted for v, c in zip(now, changes, strict=True)]
            rows += counted
        for variable, value in zip(state, start, strict=True):
            variable.assign(value)
        self.waiting.append(([total / rows for total in totals], now))
        self.apply(self.take(len(self.waiting)))

    def apply(self, count):
        for _ in range(count):
            gradients, values = self.waiting.pop(0)
            if self.scales and not all(np.isfinite(g).all() for g in gradients):
                self.skipped += 1
            else:
                own = [tf.constant(g, tf.float32) for g in gradients]
                self.optimizer.apply(own)
            for variable, value in zip(
                self.model.non_trainable_variables, values, strict=True
            ):
                variable.assign(value)

    def end_epoch(self):
        self.apply(len(self.waiting))
