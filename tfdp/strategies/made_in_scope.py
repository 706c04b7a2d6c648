"""The optimizers and metrics that were made under a strategy, wherever a program keeps
them.

A model may keep its optimizers in a dictionary, a loop in a variable, a step a metric
in a closure: no walk over attributes finds all. Each of them makes a variable when it
is made, though, and the strategy whose scope is open makes that variable.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Generic, TypeVar

from tfdp._private.names import keras_state

__all__ = ["MadeInScope"]

T = TypeVar("T")
# One thread may make a model while another one trains. For the process: a strategy with
# a lock of its own could not be copied.
_lock = threading.Lock()


class MadeInScope(Generic[T]):
    """Remembers objects for as long as anything else holds them.

    Args:
      kind: of which class they are.
    """

    def __init__(self, kind: type[T]):
        self._kind = kind
        self._known: weakref.WeakSet[T] = weakref.WeakSet()

    def note_maker(self) -> None:
        """Notes the object that is making a variable, if one is."""
        stack = keras_state.get_global_attribute("name_scope_stack") or []
        maker = getattr(stack[-1], "caller", None) if stack else None
        if isinstance(maker, self._kind):
            self.note(maker)

    def note(self, made: T) -> None:
        """Notes one."""
        with _lock:
            self._known.add(made)

    def together_with(self, others: Iterable[T]) -> list[T]:
        """All that are known, and `others`; each once."""
        with _lock:
            known = list(self._known)
        return list({id(one): one for one in [*known, *others]}.values())
