"""What the input of a `fit` knows of its own place, as a checkpoint keeps it."""

from __future__ import annotations

from typing import Any

from tfdp._private.grain_inputs import grain_input_of, own_state_of, shards_of
from tfdp.checkpoint.hosts import Hosts
from tfdp.errors import ConfigurationError
from tfdp.files.checked_json import is_count

__all__ = ["KeptInput"]

SHARDS, STATES = "shards", "states"


class KeptInput:
    """The state of a `grain` input that `fit` trains on; of others nothing.

    Args:
      adapter: Keras' data adapter of what is read.
      hosts: who read together.
    """

    def __init__(self, adapter: Any, hosts: Hosts):
        self._hosts = hosts
        source = grain_input_of(adapter)
        self._shards = 1 if source is None else shards_of(source)[1]
        self._own = None if source is None else own_state_of(adapter)
        if self._own is not None:
            self._own.keep()

    def kept(self, batches: int) -> dict[str, Any] | None:
        """What JSON can hold of it; call it on all hosts.

        Args:
          batches: how many were trained on in the pass that goes on.
        """
        if self._own is None:
            return None
        state = (batches and self._own.state_after(batches)) or ""
        texts = [state]
        if self._shards > 1:
            texts = self._hosts.texts(state, "states of the input")
        return {SHARDS: self._shards, STATES: texts}

    def put_back(self, kept: Any, batches: int) -> bool:
        """Lets the next pass begin where it was; false: it has to be read as far.

        Args:
          kept: what `kept` returned, from outside.
          batches: how many of the pass come before.

        Raises:
          ConfigurationError: another number of shards is read now.
          DataError: it is the state of another input.
        """
        shards, states = _checked(kept)
        if batches and shards != self._shards:
            raise ConfigurationError(
                f"The grain input has {self._shards} shards, and had {shards} when the "
                "checkpoint was written in the middle of a pass over it: each shard "
                "has its own samples in an order of its own, so that no place in "
                "others is the same. Go on with as many hosts as before, or read all "
                "of the input on every host (grain.sharding.NoSharding())."
            )
        if self._own is None or not batches or len(states) != max(shards, 1):
            return False
        state = states[self._hosts.rank if shards > 1 else 0]
        # All or none: who reads again would be late.
        if not all(states):
            return False
        self._own.begin_next_at(batches, state)
        return True


def _checked(kept: Any) -> tuple[int, list[str]]:
    """The number of shards, and the states; of what makes no sense, none."""
    if not isinstance(kept, dict) or not is_count(kept.get(SHARDS)):
        return 1, []
    states = kept.get(STATES)
    if not isinstance(states, list) or not all(isinstance(s, str) for s in states):
        return kept[SHARDS], []
    return kept[SHARDS], states
