"""Private state of a `grain` input and of Keras' adapter; grain is not imported.

Checked against grain 0.2.18, Keras 3.12 and 3.15.
"""

from __future__ import annotations

import weakref
from typing import Any

# By name, as in Keras: grain may be missing.
ADAPTER = "GrainDatasetAdapter"


# Keras adapter -> its `tfdp.data.grain.GrainPasses`.
_own_states: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def grain_input_of(adapter: Any) -> Any:
    """The grain loader or dataset of a Keras data adapter, or None."""
    return adapter._dataset if type(adapter).__name__ == ADAPTER else None


def shards_of(source: Any) -> tuple[int, int]:
    """(shard, number of shards) that a `grain.DataLoader` reads; (0, 1) is all.

    A grain dataset is sharded by slices, which look like any others.
    """
    options = getattr(source, "_shard_options", None)
    if options is None:
        return 0, 1
    return int(options.shard_index), int(options.shard_count)


def keep_own_state(adapter: Any, state: Any) -> None:
    """Registers `state` for as long as Keras holds the adapter."""
    _own_states[adapter] = state


def own_state_of(adapter: Any) -> Any:
    """The state that `keep_own_state` registered, or None."""
    return _own_states.get(adapter)
