"""How a layer computes with a weight that a mesh cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import keras

from tfdp.plan.mesh import MeshLayout


class Kind(NamedTuple):
    """How a layer computes with a weight in parts.

    Args:
      name: "column", "row", "lookup", "heads", or "gathered": with the whole weight.
      why: for "gathered", a sentence with the reason.
    """

    name: str
    why: str = ""


def kinds_in(
    layers: Iterable[keras.layers.Layer], layouts: Mapping[str, MeshLayout]
) -> dict[str, Kind]:
    """The kind of each weight of `layouts`, by its path."""
    why = "Layers read whole weights, which the replicas of a group gather."
    return {path: Kind("gathered", why) for path in layouts}
