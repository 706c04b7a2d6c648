"""The engine's collectives have numbers of their own: see tests/pure."""

import pytest
import tensorflow as tf

from tfdp.exchange.over_collectives import LargeSums


class Link:
    """What the engine asks of a link before it exchanges anything."""

    name, rank, workers = "sockets", 0, 2

    def on_failure(self, listener):
        pass


@pytest.mark.parametrize(
    "pair",
    [
        # By CRC-32, and by the digest.
        ((119, 1_441_487), (180, 757_059)),
        ((193, 873_842), (99, 1_544_612)),
    ],
)
def test_exchanges_of_another_place_and_size_never_share_a_number(pair):
    sums = LargeSums(["CPU:0"], Link(), "ring", members=2)
    keys = []
    for place, elements in pair:
        sums._places[0] = place
        keys.append(sums._next_key(tf.TensorSpec([elements], tf.float32), 0))
    assert keys[0] != keys[1]
    sums._places[0] = pair[0][0]
    again = sums._next_key(tf.TensorSpec([pair[0][1]], tf.float32), 0)
    assert again == keys[0]
