"""In which order TensorFlow takes the members of a group of collectives.

Its gathers, reduce-scatters and all-to-alls go by a rank that it gives itself, and no
op tells it: it sorts the members by the names of their devices, and then puts GPUs in a
row along the links that they have between them (`CompleteDefaultRanking` and
`OrderTaskDeviceMap` in collective_param_resolver_local.cc). So replica 0 need not be
its first, neither where devices are given in another order nor where only some GPUs
reach each other's memory.

It is asked by a gather of the replicas' own numbers, whose order is what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.errors import CollectiveError

__all__ = ["learn_order", "rearranged"]

# No launch of a step has it: they count up from 0, and no size has this place.
ASKING_KEY = 2**31 - 2


def learn_order(
    devices: Sequence[str],
    tokens: Sequence[tf.Variable],
    group_key: int,
    hint: str,
) -> tuple[int, ...]:
    """Which member stands at each of TensorFlow's places of a group.

    It runs at once, also while a graph is being traced.

    Args:
      devices: of the members, all of this process.
      tokens: see `names.make_token`; one for each member.
      group_key: the group's name to TensorFlow.
      hint: the implementation asked of TensorFlow.

    Returns:
      `order[place]`, an index into `devices`.

    Raises:
      CollectiveError: when the gather brings other numbers than were sent.
    """
    if len(devices) == 1:
        return (0,)

    def gathers() -> list[tf.Tensor]:
        results = []
        for member, device in enumerate(devices):
            with tf.device(device):
                # A type that lies in a GPU's own memory, which int32 does not.
                own = tf.fill([1], tf.constant(float(member)))
                result = tf.raw_ops.CollectiveGatherV2(
                    input=own,
                    group_size=len(devices),
                    group_key=group_key,
                    instance_key=ASKING_KEY,
                    ordering_token=[tokens[member].handle],
                    communication_hint=hint,
                    timeout_seconds=0.0,  # see TensorFlowEngine
                )
            results.append(result)
        return results

    with tf.init_scope(), tf.device(None):
        # As one graph, also where functions are told to run eagerly: there the first
        # member would wait for the second, which comes after it.
        told = tf.function(gathers, autograph=False).get_concrete_function()()
    orders = {tuple(int(number) for number in one.numpy()) for one in told}
    if len(orders) != 1 or sorted(*orders) != list(range(len(devices))):
        raise CollectiveError(
            f"TensorFlow's collectives gathered {sorted(orders)} where members 0 to "
            f"{len(devices) - 1} sent their numbers. Use Communication(engine="
            "'in_process')."
        )
    return orders.pop()


def rearranged(rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """`rows` with row `order[i]` at place i; as they are where that changes nothing.

    Args:
      rows: the first dimension is a multiple of `len(order)`: so many rows are one.
      order: numbers each from 0 on once.
    """
    if tuple(order) == tuple(range(len(order))):
        return rows
    whole = tf.reshape(rows, [len(order), -1])
    moved = tf.gather(whole, np.asarray(order, np.int32))
    result = tf.reshape(moved, tf.shape(rows))
    result.set_shape(rows.shape)
    return result
