"""The optimizers that were made under a strategy, wherever a program keeps them.

A model may keep its optimizers in a dictionary, a loop in a variable: no walk over
attributes finds all. Every Keras optimizer makes its counter when it is made, though,
and the strategy whose scope is open makes that variable.
"""

from __future__ import annotations

import weakref

import keras

from tfdp._private.names import keras_state

__all__ = ["MadeOptimizers"]


class MadeOptimizers:
    """Remembers optimizers for as long as anybody else does."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()

    def note_maker(self) -> None:
        """Notes the optimizer that is making a variable, if one is."""
        stack = keras_state.get_global_attribute("name_scope_stack") or []
        maker = getattr(stack[-1], "caller", None) if stack else None
        if isinstance(maker, keras.optimizers.Optimizer):
            self.note(maker)

    def note(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Notes one."""
        self._known.add(optimizer)

    def together_with(
        self, others: list[keras.optimizers.Optimizer]
    ) -> list[keras.optimizers.Optimizer]:
        """All that are known, and `others`; each once."""
        unique = {id(optimizer): optimizer for optimizer in [*self._known, *others]}
        return list(unique.values())
