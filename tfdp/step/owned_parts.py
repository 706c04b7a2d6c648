"""The part of weights and optimizer state that a host owns in `sync.Asynchronous`.

A copy of the optimizer updates them in host memory, outside of the strategy. A push
with staleness s gets the rate a / max(1, s) (Zhang et al. 2015, arXiv 1511.05950).
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.optimizer_hooks import decays, states_by_weight
from tfdp.errors import CollectiveError
from tfdp.hosts.pushes import Layouts, Push

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


class OwnedParts:
    """The parts that host `rank` owns of what `optimizer` updates.

    Args:
      optimizer: the one that the model is trained by; built, elementwise.
      variables: those that it updates, whole.
      layouts: how they are cut.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[Any],
        layouts: Layouts,
        rank: int,
    ):
        self._whole, self._variables = optimizer, list(variables)
        self._layouts, self._rank = layouts, rank
        #: The updates so far, those before this training included.
        self.version = 0
        #: By staleness, the number of updates in this process.
        self.staleness: collections.Counter[int] = collections.Counter()
        # In a thread: `tf.init_scope` does not leave the strategy's scope.
        with concurrent.futures.ThreadPoolExecutor(1) as outside:
            outside.submit(self._build).result()

    def _build(self) -> None:
        whole = self._whole
        config = whole.get_config()
        config.update(dict.fromkeys(CLIPPING), learning_rate=0.0, name="owner")
        config["loss_scale_factor"] = None
        with tf.device("CPU:0"):
            self._own = type(whole).from_config(config)
            self._parts = [
                keras.Variable(self._part(variable, place), dtype=variable.dtype)
                for place, variable in enumerate(self._variables)
            ]
            pairs = zip(self._variables, self._parts, strict=True)
            kept = [part for variable, part in pairs if not decays(whole, variable)]
            if kept:
                self._own.exclude_from_weight_decay(var_list=kept)
            self._own.build(self._parts)
        self._update = tf.function(self._update_in_graph)

    def _part(self, variable: Any, place: int) -> np.ndarray:
        """The owned part of a whole variable, as it is on this host."""
        layout = self._layouts.whole[place]
        flat = keras.ops.convert_to_numpy(variable).reshape(-1)
        return np.array(flat[slice(*layout.bounds(self._rank))])

    def _pairs(self) -> Iterator[tuple[int, Any, Any]]:
        """The places, the whole variables and the owned parts: weights, then state."""
        pairs = zip(self._variables, self._parts, strict=True)
        for place, (whole, part) in enumerate(pairs):
            yield place, whole, part
        weights = len(self._variables)
        lists = states_by_weight(self._whole, weights).values()
        for wholes, parts in zip(
            lists, states_by_weight(self._own, weights).values(), strict=True
        ):
            pairs = zip(wholes, parts, strict=True)
            for place, (whole, part) in enumerate(pairs):
                if whole is not None:
                    yield place, whole, part

    def _numbers(self) -> list[tuple[Any, Any]]:
        """State that is a number for all weights together, whole and owned."""
        of_weights = {id(one) for _, *pair in self._pairs() for one in pair}

        def numbers_of(optimizer: Any) -> list[Any]:
            return [
                variable
                for variable in optimizer.variables
                if id(variable) not in of_weights
                and variable.name not in ("learning_rate", "iteration")
            ]

        pairs = zip(numbers_of(self._whole), numbers_of(self._own), strict=True)
        return list(pairs)

    def load(self) -> None:
        """Takes the owned parts of the whole variables."""
        for place, whole, part in self._pairs():
            part.assign(self._part(whole, place))
        for whole, own in self._numbers():
            own.assign(keras.ops.convert_to_numpy(whole))
        self.version = int(keras.ops.convert_to_numpy(self._whole.iterations))
        self._own.iterations.assign(self.version)

    def apply(self, push: Push) -> None:
        """Makes one update by a push, with a rate by its staleness."""
        staleness = self.version - push.version
        if staleness < 0:
            raise CollectiveError(
                f"Worker {push.rank} pushed a gradient of version {push.version} of "
                f"weights of which here is version {self.version}."
            )
        self._own.learning_rate = push.rate / max(1, staleness)
        places = tuple(sorted(push.parts))
        self._update(
            places,
            [
                tf.constant(self._layouts.dense(push.parts[place], place, self._rank))
                for place in places
            ],
        )
        self.version += 1
        self.staleness[staleness] += 1

    def _update_in_graph(
        self, places: tuple[int, ...], gradients: list[tf.Tensor]
    ) -> None:
        # Keras would take an empty part of a small weight for one without a gradient.
        self._own.apply(gradients, [self._parts[place] for place in places])

    def weights(self) -> list[np.ndarray]:
        """Copies of the owned parts of the weights."""
        return [np.array(keras.ops.convert_to_numpy(part)) for part in self._parts]

    def numbers(self) -> list[float]:
        """The values of state that is a number for all weights together."""
        return [float(keras.ops.convert_to_numpy(own)) for _, own in self._numbers()]

    def give_back(
        self, gather: Callable[[np.ndarray, Any], np.ndarray], numbers: Sequence[float]
    ) -> None:
        """Assigns the whole variables; `gather(part, layout)` joins the parts."""
        for place, whole, part in self._pairs():
            layout = self._layouts.whole[place]
            joined = gather(np.array(keras.ops.convert_to_numpy(part)), layout)
            whole.assign(joined.reshape(layout.shape))
        for (whole, own), number in zip(self._numbers(), numbers, strict=True):
            whole.assign(number)
            own.assign(number)
        self._whole.iterations.assign(self.version)
