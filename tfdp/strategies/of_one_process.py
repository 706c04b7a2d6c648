"""A strategy belongs to the process that made it, and cannot be sent to another one."""

from __future__ import annotations

from typing import Any

from tfdp.errors import ConfigurationError

__all__ = ["OfOneProcess"]


class OfOneProcess:
    """A strategy that `pickle` refuses by name; a mixin.

    Others that pickle come to the same method: cloudpickle, Ray, multiprocessing.
    """

    def __reduce__(self) -> Any:
        """Refuses to be pickled.

        Raises:
          ConfigurationError: always.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot be pickled: it holds devices and "
            "connections of this process. Make the strategy, and the model in its "
            "scope, within the function that the other process calls: build(hp) of "
            "KerasTuner, the objective of a tuner, train_loop_per_worker of Ray. Hand "
            "over settings, model.get_weights() or files instead."
        )
