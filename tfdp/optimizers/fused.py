"""`fused`: lets XLA compile an optimizer's updates."""

from __future__ import annotations

from keras.optimizers import Optimizer

from tfdp.step.packed_updates import fuse


def fused(optimizer: Optimizer) -> Optimizer:
    """Lets XLA compile the updates of `optimizer`: fewer passes over memory.

    The equation is that of Keras: its `update_step` runs once for a pack of weights, or
    for one large weight, and XLA makes one kernel of its dozen operations. The last
    bits of a result may differ from those without `fused`; replicas stay equal.

    Args:
      optimizer: one of Keras' SGD (with momentum), Adam, AdamW, Adamax, Nadam, Lion,
        RMSprop, Adagrad and Adadelta, or a `LossScaleOptimizer` of one, before its
        first step.

    Returns:
      `optimizer`. A file does not store that it is fused: call `fused` again.

    Raises:
      ConfigurationError: for another optimizer, or one that has made a step.

    Cost: the first step compiles, about a second; a step then reads and writes weights
    and state once.

    ```python
    import keras
    import tfdp

    with tfdp.auto_strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        adam = tfdp.optimizers.fused(keras.optimizers.Adam(1e-3))
        model.compile(adam, loss="mse")
    ```
    """
    fuse(optimizer)
    return optimizer
