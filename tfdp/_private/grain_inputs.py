"""What a `grain` input keeps to itself, and Keras' adapter of one.

grain is never imported here: who hands an input in has. Checked against grain 0.2.18,
Keras 3.12 and 3.15.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

__all__ = ["OwnState", "grain_input_of", "keep_own_state", "own_state_of", "shards_of"]

# As Keras looks at it, by names: grain need not be there.
ADAPTER = "GrainDatasetAdapter"


class OwnState(Protocol):
    """What of `tfdp.data.grain.GrainPasses` others need."""

    def keep(self) -> None: ...
    def state_after(self, batches: int) -> str | None: ...
    def begin_next_at(self, batches: int, state: str) -> None: ...


_own_states: weakref.WeakKeyDictionary[Any, OwnState] = weakref.WeakKeyDictionary()


def grain_input_of(adapter: Any) -> Any:
    """The loader or dataset of grain that a data adapter of Keras' reads, or None."""
    return adapter._dataset if type(adapter).__name__ == ADAPTER else None


def shards_of(source: Any) -> tuple[int, int]:
    """Which of how many shards a `grain.DataLoader` reads; (0, 1) is all.

    A dataset of grain is cut by slices, which cannot be told from others.
    """
    options = getattr(source, "_shard_options", None)
    if options is None:
        return 0, 1
    return int(options.shard_index), int(options.shard_count)


def keep_own_state(adapter: Any, state: OwnState) -> None:
    """Lets `own_state_of` find it, for as long as Keras has the adapter."""
    _own_states[adapter] = state


def own_state_of(adapter: Any) -> OwnState | None:
    """What `keep_own_state` was given; None: nothing."""
    return _own_states.get(adapter)
