"""An optimizer of a program's own that holds another one."""

import keras


class Holding(keras.optimizers.Optimizer):
    """Has another optimizer do all of the update."""

    def __init__(self, inner):
        super().__init__(learning_rate=1.0)
        self.inner = inner

    def build(self, variables):
        super().build(variables)
        if not self.inner.built:
            self.inner.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.inner.apply(grads, trainable_variables)
        self.iterations.assign_add(1)
