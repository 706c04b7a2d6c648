"""Tables of which CI runs a part, and the tiers `rest` and `all` what is left.

Rows that nobody asked for are not made: ten thousand skipped rows cost a minute of
collecting and reporting in every process.
"""

from collections.abc import Collection, Iterable

import pytest

#: Whether this is one of these tiers; set before anything is collected.
wanted = False


def covering(names: Iterable[str], quick: Collection[str]) -> list:
    """A row for each name, for `parametrize`; those that are not `quick` are slow."""
    return made(
        pytest.param(name, marks=() if name in quick else pytest.mark.slow)
        for name in names
    )


def made(rows: Iterable) -> list:
    """Those of the rows (`pytest.param`) that this run was asked for."""
    return [
        row for row in rows if wanted or all(mark.name != "slow" for mark in row.marks)
    ]
