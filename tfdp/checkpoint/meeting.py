"""Lets any host ask that all do something after one and the same training step.

A signal comes to one host, time passes differently on each, and yet all must save after
the same step, without an exchange in the steps before. Who wants to, leaves a note; the
others answer from the thread that hears it, with the number of steps that they have
done by then. Nobody who has answered c goes beyond step c + 1 before all answers are
there; so all can meet after the largest of them plus one.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from tfdp.checkpoint.hosts import Hosts
from tfdp.errors import CollectiveError

__all__ = ["Meeting"]

POLL_SECONDS = 0.5


class Meeting:
    """One host's side of it.

    Args:
      hosts: who train together.
      name: alike on all hosts, and used once.
    """

    def __init__(self, hosts: Hosts, name: str):
        self._hosts, self._name = hosts, name
        self._changed = threading.Condition(threading.RLock())
        self._done = 0
        self._number = 0
        self._answered = False
        self._answers: dict[int, dict[str, Any]] = {}
        self._listen()

    def _listen(self) -> None:
        if self._hosts.link is not None:
            number = self._number
            self._hosts.link.on_note(self._key, lambda notes: self._hear(number, notes))

    @property
    def _key(self) -> str:
        return f"{self._name}, meeting {self._number}"

    def _hear(self, number: int, notes: dict[int, str]) -> None:
        # In the thread of the link, which must not wait.
        with self._changed:
            if number != self._number:
                return
            self._answers |= {rank: json.loads(note) for rank, note in notes.items()}
            self._changed.notify_all()
        self._answer("")

    def _answer(self, reason: str) -> None:
        with self._changed:
            if self._answered:
                return
            self._answered = True
            note = {"done": self._done, "reason": reason}
            self._answers[self._hosts.rank] = note
            key = self._key
        if self._hosts.link is not None:
            self._hosts.link.leave_note(key, json.dumps(note))

    def ask(self, reason: str) -> None:
        """Asks all hosts to meet; nothing where they are about to."""
        self._answer(reason)

    def after_step(self, done: int) -> str | None:
        """Why all meet now; None: they do not.

        Args:
          done: how many steps this host has done; the same steps on all hosts.

        Raises:
          CollectiveError: a host was lost, or did not answer in time.
        """
        with self._changed:
            self._done = done
            if not self._answered:
                return None
            self._wait_for_answers()
            answers = self._answers
            last = max(int(answer["done"]) for answer in answers.values())
            # One host, or all at the same step and none within the next: still one
            # more, so that the rule is the same.
            if self._hosts.count > 1 and done < last + 1:
                return None
            reasons = [str(answers[r]["reason"]) for r in sorted(answers)]
            self._number += 1
            self._answered, self._answers = False, {}
        self._listen()
        return next((reason for reason in reasons if reason), "")

    def _wait_for_answers(self) -> None:
        link = self._hosts.link
        if link is None:
            return
        deadline = time.monotonic() + link.timeout_seconds
        while len(self._answers) < self._hosts.count:
            self._changed.wait(POLL_SECONDS)
            news = link.news()
            if news is not None:
                raise CollectiveError(
                    f"The hosts cannot save together: {news}. The checkpoint before is "
                    "as it was."
                )
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._hosts.count)) - set(self._answers))
                raise CollectiveError(
                    f"Workers {missing} did not answer for {link.timeout_seconds:g} "
                    "seconds when asked to save. The checkpoint before is as it was."
                )
