"""Checkpoints of groups that train apart (`tfdp.sync`), read by others.

Until `start_step` groups step together, so that one device that was never interrupted
is the reference: weights that did not come along end 3e-2 away, gradients that are
counted twice or in part 2e-2; the bound is 1.5e-5.
"""

import keras
import pytest

import tfdp
from tests.devices.test_accumulation_files import (
    EVERY,
    RATE,
    SAVED_AT,
    assert_goes_on,
    fit,
    through_a_checkpoint,
    wrapped,
)
from tests.support.parity import dense_model, largest_difference


def in_groups(across, hierarchy):
    """Groups that step together until `start_step`, and so as one device."""
    sync = tfdp.sync.LocalSGD(every=2, start_step=100, across=across)
    replicas = hierarchy[0] * hierarchy[1]
    with tfdp.DataParallelStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        communication=tfdp.Communication(hierarchy=hierarchy),
    ).scope():
        model = dense_model()
        inner = keras.optimizers.SGD(RATE)
        model.compile(
            tfdp.DistributedOptimizer(inner, accumulate_steps=EVERY, sync=sync),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize(
    "writer, reader",
    [
        (("hosts", (2, 2)), ("hosts", (2, 1))),
        (("hosts", (2, 1)), ("hosts", (2, 2))),
        (("hosts", (2, 2)), ("hosts", (2, 2))),
        (("hosts", (2, 2)), ("replicas", (2, 2))),
        (("replicas", (2, 2)), ("hosts", (2, 2))),
        (("replicas", (1, 3)), ("replicas", (1, 2))),
    ],
)
def test_groups_that_train_apart_keep_what_they_add_up_to(writer, reader, tmp_path):
    """Of a group of half as many replicas each has twice as much."""
    other = in_groups(*reader)
    model = fit(in_groups(*writer), 0, SAVED_AT)
    through_a_checkpoint(tmp_path, model, other)
    # Groups have as many rows, so their mean is one device's.
    assert_goes_on(other, wrapped)


def test_other_replicas_of_a_host_start_from_the_outer_weights(tmp_path):
    """Each host has written a mark of its local weights, which are not theirs."""
    model = fit(in_groups("replicas", (1, 3)), 0, EVERY)
    other = in_groups("replicas", (1, 2))
    through_a_checkpoint(tmp_path, model, other)
    fit(other, EVERY, 2 * EVERY)
    fit(model, EVERY, 2 * EVERY)
    assert largest_difference(model, other) < 1e-5
