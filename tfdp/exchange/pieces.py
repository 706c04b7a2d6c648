"""Tensors in flat pieces of limited size: large ones cut, small ones side by side."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["cut_pieces", "join_pieces", "plan_pieces"]

# For each piece, in order: which tensor, and how many elements of it.
Plan = list[list[tuple[int, int]]]


def plan_pieces(element_counts: Sequence[int], most_elements: int) -> Plan:
    """Which elements of which tensor go into which piece.

    Args:
      element_counts: of each tensor.
      most_elements: of a piece, at least 1.

    >>> plan_pieces([3, 2, 9, 1], 4)
    [[(0, 3)], [(1, 2)], [(2, 4)], [(2, 4)], [(2, 1), (3, 1)]]
    """
    plan: Plan = []
    room = 0
    for tensor, elements in enumerate(element_counts):
        # A tensor that fits into one piece is not torn apart.
        if room < min(elements, most_elements):
            room = 0
        while elements:
            if not room:
                plan.append([])
                room = most_elements
            taken = min(elements, room)
            plan[-1].append((tensor, taken))
            room -= taken
            elements -= taken
    return plan


def cut_pieces(tensors: Sequence[tf.Tensor], plan: Plan) -> list[tf.Tensor]:
    """The pieces of `plan`, flat."""
    sizes: list[list[int]] = [[] for _ in tensors]
    for piece in plan:
        for tensor, elements in piece:
            sizes[tensor].append(elements)
    parts = [
        _split(tensor, of_it) for tensor, of_it in zip(tensors, sizes, strict=True)
    ]
    pieces = []
    for piece in plan:
        inside = [parts[tensor].pop(0) for tensor, _ in piece]
        pieces.append(inside[0] if len(inside) == 1 else tf.concat(inside, 0))
    return pieces


def join_pieces(
    pieces: Sequence[tf.Tensor], plan: Plan, like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The inverse of `cut_pieces`: tensors shaped as those in `like`."""
    parts: list[list[tf.Tensor]] = [[] for _ in like]
    for piece, inside in zip(pieces, plan, strict=True):
        sizes = [elements for _, elements in inside]
        for part, (tensor, _) in zip(_split(piece, sizes), inside, strict=True):
            parts[tensor].append(part)
    return [
        tf.reshape(tf.concat(of_it, 0) if of_it else tensor, tensor.shape)
        for of_it, tensor in zip(parts, like, strict=True)
    ]


def _split(tensor: tf.Tensor, sizes: list[int]) -> list[tf.Tensor]:
    flat = tf.reshape(tensor, [-1])
    return [flat] if len(sizes) == 1 else tf.split(flat, sizes) if sizes else []
