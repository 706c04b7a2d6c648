"""Graphs of functions that several replicas may call: what may not be built there."""

from __future__ import annotations

from typing import Any

from tfdp._private.names import graphs_inside

__all__ = [
    "ExchangeInside",
    "is_traced_alone",
    "mark_traced_alone",
    "refuse_variable",
]

# Set on the graph of such a function while it is traced.
MARK = "_tfdp_traced_alone"


class ExchangeInside(Exception):
    """What replicas do together was about to be built into such a function."""


def refuse_variable(next_creator: Any, **options: Any) -> Any:
    """A variable creator for such graphs, in which nobody would initialize it.

    Raises:
      ExchangeInside: always; replicas get their copies of a variable together.
    """
    raise ExchangeInside


def mark_traced_alone(graph: Any) -> None:
    """What is built into `graph` from now on is for any replica that calls it."""
    setattr(graph, MARK, True)


def is_traced_alone() -> bool:
    """Whether what is built now goes into such a function."""
    return any(getattr(graph, MARK, False) for graph in graphs_inside(None))
