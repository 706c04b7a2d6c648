"""The states of Python's and NumPy's global generators, as JSON can hold them.

Keras shuffles the batches of a `PyDataset` by Python's, at the beginning of each epoch.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tfdp.checks import is_number, is_whole

__all__ = ["put_back_random", "random_now"]

WORDS = 624


def random_now() -> dict[str, Any]:
    """Both states."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state()
    name, keys, place, has_gauss, cached = state
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), keys.tolist(), int(place), int(has_gauss), float(cached)],
    }


def put_back_random(said: Any) -> bool:
    """Gives both what `random_now` returned; false when that is not what came."""
    try:
        version, words, gauss = said["python"]
        name, keys, place, has_gauss, cached = said["numpy"]
        are_words = all(is_whole(word, 0, 2**32 - 1) for word in (*words, *keys))
        if not are_words or len(keys) != WORDS or name != "MT19937":
            return False
        if not (is_whole(place, 0, WORDS) and is_number(cached)):
            return False
        random.setstate((version, tuple(words), gauss))
        state = (name, np.array(keys, np.uint32), place, int(bool(has_gauss)), cached)
        np.random.set_state(state)
    except (KeyError, TypeError, ValueError):
        return False
    return True
