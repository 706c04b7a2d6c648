"""What a host knows of a group whose members may die and come back; pure rules.

Every meeting of the group has a number, the update after which it is, and ends with an
epoch, one more than before, and the ranks of its members. A host that learns of an
epoch as new as its own or newer in which it is no member is out: the group went on
without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdp.hosts.messages import checked_integer, checked_text

# Of updates, epochs and batches: what another host says is no larger.
MOST_COUNT = 2**62
MOST_PORT = 65535
MOST_CHARACTERS = 255

# What another host's answer means to this one.
ALIVE = "it takes part, or will"
DONE = "it has done this meeting, with this host among the members"
OUT = "the group went on without this host"
GONE = "it is another process, or has lost what it had"

Address = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a host says of itself at its door.

    Args:
      session: of the group; "" before there is one.
      is_in: whether it has the group's state; False: it waits to come in.
      epoch: of the newest agreement that it knows.
      done: the update after which it met last.
      at: the update of the meeting that it is in; None: it trains.
      members: of that epoch, without those it has found dead since.
      addresses: where each host that it knows listens, by rank.
      place: epoch of `fit` and batch in it, from 0, that it is at.
    """

    session: str
    is_in: bool
    epoch: int
    done: int
    at: int | None
    members: tuple[int, ...]
    addresses: Mapping[int, Address]
    place: tuple[int, int]

    @property
    def leader(self) -> int | None:
        """The lowest of the members, who adds up."""
        return min(self.members, default=None)


@dataclasses.dataclass
class View:
    """What this host knows of its group; see `Answer`.

    Args:
      rank: of this host.
    """

    rank: int
    session: str = ""
    is_in: bool = False
    epoch: int = 0
    done: int = 0
    at: int | None = None
    members: tuple[int, ...] = ()
    addresses: dict[int, Address] = dataclasses.field(default_factory=dict)
    place: tuple[int, int] = (0, 0)
    #: Another host said so: the group goes on without this one.
    is_told_out: bool = False

    def as_json(self) -> dict[str, Any]:
        """For `parse_answer`."""
        return {
            "session": self.session,
            "is_in": self.is_in and not self.is_told_out,
            "epoch": self.epoch,
            "done": self.done,
            "at": self.at,
            "members": list(self.members),
            "addresses": addresses_as_json(self.addresses),
            "place": list(self.place),
        }

    def drop(self, rank: int) -> None:
        """Goes on without a host that is dead; never taken back."""
        self.members = tuple(member for member in self.members if member != rank)


def addresses_as_json(addresses: Mapping[int, Address]) -> dict[str, list[Any]]:
    """For `parse_addresses`."""
    return {str(rank): list(address) for rank, address in addresses.items()}


def parse_answer(message: Mapping[str, Any], workers: int) -> Answer:
    """A host's answer, checked.

    Raises:
      ValueError: when it is none.
    """
    at = message.get("at")
    return Answer(
        session=checked_text(message.get("session"), MOST_CHARACTERS),
        is_in=message.get("is_in") is True,
        epoch=checked_integer(message.get("epoch"), 0, MOST_COUNT),
        done=checked_integer(message.get("done"), 0, MOST_COUNT),
        at=None if at is None else checked_integer(at, 0, MOST_COUNT),
        members=parse_members(message.get("members"), workers),
        addresses=parse_addresses(message.get("addresses"), workers),
        place=parse_place(message.get("place")),
    )


def parse_place(value: object) -> tuple[int, int]:
    """Epoch of `fit` and batch in it, or a ValueError."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("no place")
    epoch, batch = (checked_integer(number, 0, MOST_COUNT) for number in value)
    return epoch, batch


def parse_members(value: object, workers: int) -> tuple[int, ...]:
    """Ranks in order, each once, or a ValueError."""
    if not isinstance(value, list) or len(value) > workers:
        raise ValueError("no list of members")
    ranks = [checked_integer(rank, 0, workers - 1) for rank in value]
    if ranks != sorted(set(ranks)):
        raise ValueError("members out of order")
    return tuple(ranks)


def parse_addresses(value: object, workers: int) -> dict[int, Address]:
    """Host and port by rank, or a ValueError."""
    if not isinstance(value, dict) or len(value) > workers:
        raise ValueError("no table of addresses")
    addresses = {}
    for text, entry in value.items():
        if not isinstance(entry, list) or len(entry) != 2:
            raise ValueError("no address")
        rank = checked_integer(int(checked_text(text, 20)), 0, workers - 1)
        addresses[rank] = (
            checked_text(entry[0], MOST_CHARACTERS),
            checked_integer(entry[1], 1, MOST_PORT),
        )
    return addresses


def judge(view: View, answer: Answer, update: int | None = None) -> str:
    """What another host's answer means to this one: ALIVE, DONE, OUT or GONE.

    Args:
      view: of this host, a member.
      answer: of another that it takes for a member.
      update: of the meeting that this host is in.
    """
    if answer.session != view.session or not answer.is_in:
        return GONE
    if view.rank not in answer.members and answer.epoch >= view.epoch:
        return OUT
    if update is not None and answer.done >= update and answer.epoch > view.epoch:
        return DONE
    return ALIVE
