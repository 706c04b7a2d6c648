"""Tensors cut into pieces and joined again are the same."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.exchange.over_collectives import cut_chunks, join_chunks, plan_chunks

SHAPES = {
    "small ones share a piece": [(2,), (1, 3), (), (2, 2)],
    "a large one is cut": [(3,), (5, 7), (2,)],
    "an empty one": [(2,), (0, 3), (4,)],
    "one alone": [(6,)],
}


@pytest.mark.parametrize("most_elements", [1, 4, 10, 1000])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_joined_again_they_are_the_same(shapes, most_elements):
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = np.cumsum([0, *sizes])
    tensors = [
        tf.reshape(tf.range(start, start + size), shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]
    plan = plan_chunks(sizes, most_elements)
    pieces = cut_chunks(tensors, plan)
    assert all(1 <= piece.shape[0] <= most_elements for piece in pieces)
    # No number is lost or sent twice.
    assert np.concatenate(pieces).tolist() == list(range(sum(sizes)))
    for tensor, joined in zip(tensors, join_chunks(pieces, plan, tensors), strict=True):
        assert joined.shape == tensor.shape
        assert joined.numpy().tolist() == tensor.numpy().tolist()


def test_what_fits_into_one_piece_is_not_cut():
    for piece in plan_chunks([3, 3, 3, 9], 4)[:3]:
        assert len(piece) == 1
