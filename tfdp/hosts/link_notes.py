"""What workers tell each other beside exchanges: notes, by way of worker 0."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from tfdp.errors import WorkerLostError
from tfdp.hosts.broken_exchange import closed
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.last_words import lost_another
from tfdp.hosts.membership import Membership
from tfdp.hosts.waits import Waits

__all__ = ["LinkWithNotes"]


class LinkWithNotes(HostLink):
    """The notes of a `HostLink`, over its membership."""

    _membership: Membership
    _waits: Waits
    _is_closed: bool

    def share_note(
        self, key: str, note: str, has_deadline: bool = True
    ) -> dict[int, str]:
        """See `HostLink.share_note`."""
        missing = functools.partial(self.without_note, key)
        seconds = self.timeout_seconds if has_deadline else None
        with (
            self._waiting_for_word(key),
            self._waits.waiting(f"a comparison ({key})", missing),
        ):
            return self._membership.share_note(key, note, seconds)

    def without_note(self, key: str) -> list[int]:
        """See `HostLink.without_note`."""
        return self._membership.without_note(key)

    def leave_note(self, key: str, note: str) -> None:
        """See `HostLink.leave_note`."""
        self._membership.leave_note(key, note)

    def wait_for_notes(
        self, key: str, enough: Callable[[dict[int, str]], bool]
    ) -> dict[int, str]:
        """See `HostLink.wait_for_notes`."""
        with self._waiting_for_word(key):
            return self._membership.wait_for_notes(key, enough, self.timeout_seconds)

    def on_note(self, key: str, listener: Callable[[dict[int, str]], None]) -> None:
        """See `HostLink.on_note`."""
        self._membership.on_note(key, listener)

    def give_up(self, reason: str) -> None:
        """See `HostLink.give_up`."""
        self._membership.give_up(reason)

    @contextlib.contextmanager
    def _waiting_for_word(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._is_closed:
                raise closed(self.rank, f"it waited for a word on {key!r}") from error
            lost_another()
            raise WorkerLostError(
                f"Worker {self.rank} waited for a word of the others on {key!r}: "
                f"{error}. Look at their output for the first error."
            ) from error
