"""`IdleOptions`: options that act between hosts only, where there is one host."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["IdleOptions"]


class IdleOptions:
    """What `auto_strategy` was given and left out; a strategy made by name refuses it.

    Args:
      where: "one host" or "a TPU".
      reasons: why each option cannot act there, by name.

    >>> idle = IdleOptions("one host", {"min_hosts": "there are no others"})
    >>> idle.lines
    ('min_hosts has no effect on one host: there are no others',)
    """

    def __init__(self, where: str, reasons: Mapping[str, str]):
        self._where = where
        self._reasons = dict(reasons)

    def add(self, option: str, why: str) -> None:
        """Leaves out one more option, which is no argument of the strategy."""
        self._reasons[option] = why

    @property
    def lines(self) -> tuple[str, ...]:
        """What the first `fit` says of them."""
        return tuple(
            f"{option} has no effect on {self._where}: {why}"
            for option, why in self._reasons.items()
        )
