"""A strategy in one line: what `repr` gives, and what the first `fit` says."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp._private.frames import fits_around

# More devices than this are given as the first and the last.
MOST_NAMED_DEVICES = 4


def strategy_in_words(
    kind: str,
    devices: Sequence[str],
    *,
    hosts: int = 1,
    engine: str,
    shard: str = "none",
) -> str:
    """One line that says what trains, on what, and how sums travel.

    Args:
      kind: the strategy's class.
      devices: those of this host, one replica each.
      hosts: how many there are, with as many devices each.
      engine: what carries gradients.
      shard: what each replica holds a part of.

    >>> strategy_in_words("A", ["/device:GPU:0", "/device:GPU:1"], engine="tensorflow")
    'A(2 replicas: GPU:0, GPU:1; engine tensorflow)'
    >>> strategy_in_words("A", ["/device:CPU:0"], hosts=3, engine="sockets")
    'A(3 replicas on 3 hosts, here CPU:0; engine sockets)'
    """
    replicas = hosts * len(devices)
    count = "1 replica" if replicas == 1 else f"{replicas} replicas"
    where = f" on {hosts} hosts, here " if hosts > 1 else ": "
    parts = [f"{count}{where}{_named(devices)}", f"engine {engine}"]
    if shard != "none":
        parts.append(f"shard {shard}")
    return f"{kind}({'; '.join(parts)})"


def _named(devices: Sequence[str]) -> str:
    names = [device.rsplit("device:", 1)[-1] for device in devices]
    if len(names) > MOST_NAMED_DEVICES:
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


_unsaid: list[bool] = []


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """Within it no `fit` says anything: trainings that only compare."""
    _unsaid.append(True)
    try:
        yield
    finally:
        _unsaid.pop()


class FirstFit:
    """Says on standard error what trains, when a `fit` begins, once in a process.

    Strategies that are alike, as those of a cross-validation, say it once together.
    """

    _said: set[str] = set()

    def __init__(self) -> None:
        self._looked_at = 0  # lines

    def look(self, strategy: Any, notes: Sequence[str]) -> None:
        """Says it, if Keras' `fit` is among the callers.

        Args:
          strategy: its `repr` is said, by worker 0.
          notes: lines that follow; later ones are said when they are there.
        """
        count = 1 + len(notes)
        if count == self._looked_at or _unsaid or next(fits_around(), None) is None:
            return
        lines = (repr(strategy), *notes)[self._looked_at :]
        self._looked_at = count
        for line in lines:
            if strategy.is_chief and line not in self._said:
                self._said.add(line)
                # Ray Train writes what is printed a second time.
                sys.stderr.write(f"tfdp: {line}\n")
