"""Times several arms in turn, so that a slow minute of the machine affects all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence


def turns(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Every name once per repeat, each repeat starting one place later."""
    for repeat in range(repeats):
        shift = repeat % len(names)
        yield from names[shift:]
        yield from names[:shift]


def time_in_turn(
    arms: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    calls: int,
    finish: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each arm, one figure per repeat.

    A repeat runs every arm once, starting one arm later than the repeat before (A B C,
    then B C A), so that no arm always follows the same other. Each arm first makes one
    untimed call, since the previous arm's data is in the caches and the allocator.
    `finish` waits until all calls are done, where calls return early (GPUs).

    >>> ticks = iter(range(100))
    >>> time_in_turn({"a": int}, repeats=2, calls=1, clock=lambda: next(ticks))
    {'a': [1.0, 1.0]}
    """
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in turns(names, repeats):
            call = arms[name]
            call()
            finish()
            start = clock()
            for _ in range(calls):
                call()
            finish()
            seconds[name].append((clock() - start) / calls)
    finally:
        if gc_was_enabled:
            gc.enable()
    return seconds
