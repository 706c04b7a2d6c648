"""A one-line description of a strategy, for `repr` and the first `fit`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp._private.frames import fits_around

# Of more devices than this, only the first and the last are named.
MOST_NAMED_DEVICES = 4


def describe_strategy(
    kind: str,
    devices: Sequence[str],
    *,
    hosts: int = 1,
    engine: str,
    options: Sequence[str] = (),
) -> str:
    """One line: the replicas, their devices on this host, the engine and `options`.

    >>> describe_strategy("A", ["/device:GPU:0", "/device:GPU:1"], engine="tensorflow")
    'A(2 replicas: GPU:0, GPU:1; engine tensorflow)'
    >>> describe_strategy("A", ["/device:CPU:0"], hosts=3, engine="sockets")
    'A(3 replicas on 3 hosts, here CPU:0; engine sockets)'
    """
    replicas = hosts * len(devices)
    count = "1 replica" if replicas == 1 else f"{replicas} replicas"
    where = f" on {hosts} hosts, here " if hosts > 1 else ": "
    parts = [f"{count}{where}{_named(devices)}", f"engine {engine}", *options]
    return f"{kind}({'; '.join(parts)})"


def _named(devices: Sequence[str]) -> str:
    names = [device.rsplit("device:", 1)[-1] for device in devices]
    if len(names) > MOST_NAMED_DEVICES:
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


_unsaid: list[bool] = []


@contextlib.contextmanager
def without_fit_message() -> Iterator[None]:
    """Silences the messages of `fit` within the context: for comparisons."""
    _unsaid.append(True)
    try:
        yield
    finally:
        _unsaid.pop()


def is_without_fit_message() -> bool:
    """Whether the caller runs within `without_fit_message`."""
    return bool(_unsaid)


class FirstFitNotice:
    """Prints a strategy to standard error when a `fit` begins, equal ones only once."""

    _said: set[str] = set()

    def __init__(self) -> None:
        self._printed = 0  # lines

    def look(self, strategy: Any, notes: Sequence[str]) -> None:
        """Prints the strategy and new `notes` if called, on worker 0, within `fit`."""
        count = 1 + len(notes)
        if count == self._printed or _unsaid or next(fits_around(), None) is None:
            return
        lines = (repr(strategy), *notes)[self._printed :]
        self._printed = count
        for line in lines:
            if strategy.is_chief and line not in self._said:
                self._said.add(line)
                # Not `print`: Ray Train writes standard output a second time.
                sys.stderr.write(f"tfdp: {line}\n")
