"""Losses and gradients that a program gives to Keras and to its optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tfdp.tracing.step import Step


@dataclass
class GivenLosses:
    """Losses and gradients of a step, for the checks at its end."""

    #: Gradients that the program gives optimizers: rank, gradients, optimizer's name.
    gradients: list[tuple[Any, list[Any], str]] = field(default_factory=list)
    #: Whether a loss was scaled to its share of the global one.
    are_scaled: bool = False
    #: Whether losses of layers (penalties, `add_loss`) were added to the model's.
    are_added: bool = False
    #: Whether the program reads the number of replicas in a replica, to scale by it.
    scales_by_hand: bool = False


def note_gradients(step: Step, rank: Any, gradients: Iterable[Any], name: str) -> None:
    """Records gradients that a program gives the optimizer `name`."""
    is_first = step.trace(rank) is step.traces[0]
    # One replica is enough: all do the same.
    if step.group_size > 1 and is_first:
        step.of(GivenLosses).gradients.append((rank, list(gradients), name))
