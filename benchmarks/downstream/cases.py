"""What the programs share: their registry, their data, and how one is judged."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

ROWS, BATCH, EPOCHS = 21, 8, 2  # the last batch has five rows: three and two

#: Losses are means over a few hundred float32 products, over six updates: differences
#: by other orders of sums are some 1e-7, and a wrong step is a thousand times as far.
BOUND = 2e-5

Numbers = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program's numbers under the strategy compare with those without it."""

    case: str
    state: str  # equal, told, differs, refused, or "fails without"
    largest: float | None
    words: str


def draw(*shape: int) -> np.ndarray:
    """Normal numbers, the same ones for every call with one shape."""
    generator = np.random.default_rng(len(shape) + sum(shape))
    return generator.normal(size=shape).astype("float32")


def integers(below: int, *shape: int) -> np.ndarray:
    """Whole numbers from 1, the same ones for every call with one shape."""
    generator = np.random.default_rng(below + sum(shape))
    return generator.integers(1, below, size=shape).astype("int32")


def fit(model: Any, x: Any, y: Any, **options: Any) -> Numbers:
    """Trains, and returns the losses, the metrics and the predictions."""
    options = {"batch_size": BATCH, "epochs": EPOCHS, **options}
    history = model.fit(x, y, shuffle=False, verbose=0, **options).history
    return {**history, "predictions": model.predict(x, batch_size=BATCH, verbose=0)}


def _leaves(numbers: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(numbers, Mapping):
        for key, value in numbers.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(numbers, list | tuple):
        for at, value in enumerate(numbers):
            yield from _leaves(value, f"{path}/{at}")
    else:
        yield path, np.asarray(numbers, "float64")


def _largest(found: Numbers, expected: Numbers) -> tuple[float, str]:
    """Returns the largest difference, as a part of the largest number, and its name."""
    mine, other = dict(_leaves(found)), dict(_leaves(expected))
    if mine.keys() != other.keys():
        return np.inf, f"{sorted(mine.keys() ^ other.keys())}"
    worst = 0.0, ""
    for name, value in mine.items():
        scale = max(1.0, float(np.abs(other[name]).max(initial=0.0)))
        distance = np.abs(value - other[name]).max(initial=0.0) / scale
        worst = max(worst, (float(np.nan_to_num(distance, nan=np.inf)), name))
    return worst


def _in_a_line(error: BaseException | str) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def judge(name: str, case: Callable[..., Numbers]) -> Outcome:
    """Runs a program without and under a strategy of two replicas.

    A program that takes an argument is given the strategy, or None, and opens no scope.
    """
    import keras

    import tfdp
    from tfdp.errors import TfdpError

    def run(strategy: tfdp.DataParallelStrategy | None) -> Numbers:
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        if inspect.signature(case).parameters:
            return case(strategy)
        with strategy.scope() if strategy else contextlib.nullcontext():
            return case()

    try:
        expected = run(None)
    except Exception as error:  # of the library, or of this Keras: no word on tfdp
        return Outcome(name, "fails without", None, _in_a_line(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run(tfdp.DataParallelStrategy(["CPU:0", "CPU:1"]))
        except TfdpError as error:
            return Outcome(name, "refused", None, _in_a_line(error))
        except Exception as error:
            return Outcome(name, "fails", None, _in_a_line(error))
    told = [
        _in_a_line(w.message) for w in caught if w.category.__module__ == "tfdp.errors"
    ]
    largest, where = _largest(found, expected)
    if largest <= BOUND:
        return Outcome(name, "equal", largest, "; ".join(told))
    state = "told" if told else "differs"
    return Outcome(name, state, largest, "; ".join([where, *told]))
