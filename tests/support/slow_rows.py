"""Tables of which CI runs a part, and `--slow` all."""

from collections.abc import Collection, Iterable

import pytest


def covering(names: Iterable[str], quick: Collection[str]) -> list:
    """A row for each name, for `parametrize`; those that are not `quick` are slow."""
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow)
        for name in names
    ]
