"""Which masks, or sample weights, of a step are the same, though computed twice."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.lint.registry import is_of_graph

# Ops that keep the values of their first input, as far as masks are concerned.
SAME = {"All", "Cast", "EnsureShape", "ExpandDims", "Identity", "Reshape", "Squeeze"}
JOINED = {"ConcatV2", "LogicalAnd", "LogicalOr", "Pack"}
COMPARED = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"}
# The depth of a mask that layers have passed on; deeper ones count as different.
MOST_OPS = 24


class MaskNumbers:
    """Numbers masks, or weights; equal, recomputed or cast ones get the same number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}

    def __call__(self, of: Any, depth: int = MOST_OPS) -> int:
        if id(of) not in self._known:
            self._known[id(of)] = self._number_of(of, depth)
        return self._known[id(of)]

    def _number_of(self, of: Any, depth: int) -> int:
        if not is_of_graph(of) or not depth:
            return self._numbered(id(of))
        op = of.op
        if op.type == "Const":
            return self._numbered(tf.get_static_value(of).tobytes())
        if op.type not in SAME | JOINED | COMPARED:
            return self._numbered(id(of))
        parts = [self(part, depth - 1) for part in op.inputs]
        if op.type in SAME:
            return parts[0]
        if op.type in JOINED:
            # Merging layers keep the union or the intersection of their inputs' masks.
            parts = parts[:-1] if op.type == "ConcatV2" else parts
            if len(set(parts)) == 1:
                return parts[0]
        return self._numbered((op.type, *parts))

    def _numbered(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
