"""Which ops of a function are needed, and an order in which they can run."""

from __future__ import annotations

from typing import Any

__all__ = ["in_order", "needed_ops"]


def needed_ops(graph: Any) -> set[str]:
    """The names of the ops that the function's results, or its effects, need."""
    stack = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen: set[str] = set()
    while stack:
        op = stack.pop()
        if op.name not in seen:
            seen.add(op.name)
            stack += [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return seen


def in_order(graph: Any, needed: set[str]) -> list[Any]:
    """The needed ops, each after what it reads; a `Recv` after its `Send`."""
    ops = {op.name: op for op in graph.get_operations() if op.name in needed}
    senders = {
        op.get_attr("tensor_name"): op
        for op in ops.values()
        if op.type in ("Send", "_Send")
    }

    turn = {name: number for number, name in enumerate(ops)}

    def before(op: Any) -> list[Any]:
        found = [tensor.op for tensor in op.inputs]
        # TensorFlow lists them in another order each time.
        found += sorted(op.control_inputs, key=lambda op: turn.get(op.name, -1))
        if op.type in ("Recv", "_Recv"):
            sender = senders.get(op.get_attr("tensor_name"))
            found += [sender] if sender is not None else []
        return [source for source in found if source.name in ops]

    ordered: list[Any] = []
    done: set[str] = set()
    for start in ops.values():
        stack = [(start, iter(before(start)))] if start.name not in done else []
        opened = {start.name}
        while stack:
            op, sources = stack[-1]
            source = next((s for s in sources if s.name not in done), None)
            if source is None:
                stack.pop()
                done.add(op.name)
                ordered.append(op)
            elif source.name not in opened:
                opened.add(source.name)
                stack.append((source, iter(before(source))))
    return ordered
