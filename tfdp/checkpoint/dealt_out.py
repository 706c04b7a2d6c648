"""Which host writes what of a checkpoint."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np

from tfdp.checkpoint.entries import Entry
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import Noted
from tfdp.checkpoint.restored import GIVEN

__all__ = ["deal_out", "given_entries"]


def given_entries(arrays: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    """The entries of arrays that `save` was given beside the model."""
    given = {name: np.asarray(array) for name, array in arrays.items()}
    return {
        f"{GIVEN}{name}": Entry(
            name,
            "whole",
            array.shape,
            array.dtype.name,
            functools.partial(np.asarray, array),
            lambda value: None,
        )
        for name, array in given.items()
    }


def deal_out(
    entries: Mapping[str, Entry], hosts: Hosts
) -> tuple[dict[str, Noted], list[str]]:
    """What the manifest says of the entries, and the names of those of this host."""
    noted, mine = {}, []
    filled = [0] * hosts.count
    for name, entry in entries.items():
        parts = entry.lengths
        has_some = True
        if entry.kind == "whole":
            # All have it: the least loaded one writes it.
            part = filled.index(min(filled))
            filled[part] += math.prod(entry.shape)
            parts, has_some = (part,), part == hosts.rank
        elif entry.kind == "shards":
            has_some = bool(parts[hosts.rank])
        noted[name] = Noted(entry.path, entry.kind, entry.shape, entry.dtype, parts)
        if has_some:
            mine.append(name)
    return noted, mine
