"""`ReplicaCheck` with a mesh: it compares the copies of a block, and no two blocks."""

import re

import keras
import numpy as np
import pytest

from tests.support.grids import MLP_RULES, grid, mlp, rows_of
from tfdp.callbacks import ReplicaCheck
from tfdp.errors import ReplicaDriftError
from tfdp.step.replicated_state import replicated_state_of

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

RULES = {**MLP_RULES, "head/kernel": ("data",)}


class Plant(keras.callbacks.Callback):
    """Assigns to one replica's block in the second batch."""

    def __init__(self, ending, rank):
        super().__init__()
        self.ending, self.rank = ending, rank

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            variables = [*self.model.variables, *self.model.optimizer.variables]
            found = next(v for v in variables if v.path.endswith(self.ending))
            copy = found.value.values[self.rank]
            value = copy.numpy()
            value.flat[0] = np.nextafter(value.flat[0], np.float32(9))
            copy.assign(value)


def fit(*callbacks, shape=(2, 2), start=None, **options):
    with grid(shape, RULES, shard_min_bytes=0, **options).scope():
        model = mlp()
        if start:
            start(model)
        model.compile(
            keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    x, y = rows_of(30)
    model.fit(x, y, batch_size=12, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_copies_that_train_are_alike(shape, shard):
    check = ReplicaCheck(1)
    model = fit(check, shape=shape, shard=shard)
    assert check.checks == 3 and not check.drifts
    kept = {kept.name: kept for kept in replicated_state_of(model, 0)}
    holders = [0, 1, 0, 1] if shape == (2, 2) else [0, 1, 2, 3]
    for name in ("up/kernel", "up_kernel_velocity", "up_kernel_average"):
        [found] = [kept[path] for path in kept if f"{name} (shards)" in path]
        assert list(found.kept_with) == holders and found.spans_hosts
    assert not [name for name in kept if "accumulator" in name]
    # Those of `shard=` are held once.
    assert ("down/bias" in kept) == (shard == "none")


@pytest.mark.parametrize(
    "ending, rank, others",
    [
        ("up/kernel", 3, [1]),
        ("up_kernel_momentum", 0, [2]),
        ("down_kernel_average", 2, [0]),
        ("head/kernel", 1, [0]),  # which the other axis cuts
        ("head/bias", 3, [0, 1, 2]),
    ],
)
def test_one_copy_that_differs_is_named(ending, rank, others):
    with pytest.raises(ReplicaDriftError, match=ending) as error:
        fit(Plant(ending, rank), ReplicaCheck(1))
    # Of a block that two replicas hold there is no majority.
    [drift] = error.value.drifts
    wanted = [rank] if len(others) > 1 else sorted([rank, *others])
    assert list(drift.ranks) == wanted and drift.is_known == (len(others) > 1)
    assert re.search(f"replica {wanted[0]}", str(error.value))


def test_equal_blocks_that_are_not_copies_are_not_compared():
    """A weight of zeros has equal blocks, and one that changes is no drift."""

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.get_layer("up").kernel
            for rank in (1, 3):  # both copies of the second block
                copy = kernel.value.values[rank]
                copy.assign(copy + 1)

    def start(model):
        model.get_layer("up").kernel.assign(np.zeros((12, 16), "float32"))

    check = ReplicaCheck(1)
    fit(check, Change(), start=start)
    assert check.checks == 3 and not check.drifts
