"""One host's knowledge of its elastic group; pure rules, no sockets.

Each outer all-reduce has a number, the update after which it happens, and ends with an
epoch, one more than before, and the ranks of its members. A host that learns of an
epoch no older than its own in which it is not a member has been left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdp.hosts.messages import checked_address, checked_integer, checked_text

# The largest update, epoch or batch number accepted from another host.
MOST_COUNT = 2**62

# Results of `judge`.
ALIVE = "it takes part, or will"
DONE = "it has finished this all-reduce, with this host among the members"
OUT = "the group went on without this host"
GONE = "it is another process, or has lost its state"

Address = tuple[str, int]


@dataclasses.dataclass
class ViewReply:
    """A host's reply to a query: what it knows of the group."""

    session: str = ""  # of the group; "" before there is one
    is_in: bool = False  # whether it has the group's state; not while it waits to join
    epoch: int = 0  # of the newest agreement it has
    done: int = 0  # the update of its last all-reduce
    at: int | None = None  # the update of the all-reduce it is in; None: it trains
    members: tuple[int, ...] = ()  # of that epoch, without those found dead since
    # Where the hosts listen.
    addresses: Mapping[int, Address] = dataclasses.field(default_factory=dict)
    place: tuple[int, int] = (0, 0)  # its epoch of `fit` and batch, from 0
    made: int = 0  # the update that its own training has come to

    @property
    def leader(self) -> int | None:
        return min(self.members, default=None)


@dataclasses.dataclass
class View(ViewReply):
    """The knowledge of this host (`rank`) about its group."""

    addresses: dict[int, Address] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    rank: int
    is_excluded: bool = False  # reported by another host
    is_over: bool = False  # the training of this `fit`, here or where the state is from

    def as_json(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "is_in": self.is_in and not self.is_excluded,
            "epoch": self.epoch,
            "done": self.done,
            "made": self.made,
            "at": self.at,
            "members": list(self.members),
            "addresses": {str(rank): list(at) for rank, at in self.addresses.items()},
            "place": list(self.place),
        }

    def drop(self, rank: int) -> None:
        self.members = tuple(member for member in self.members if member != rank)


def parse_answer(message: Mapping[str, Any], workers: int) -> ViewReply:
    """Parses a host's reply; raises ValueError, as the functions below."""
    at = message.get("at")
    return ViewReply(
        session=checked_text(message.get("session"), 255),
        is_in=message.get("is_in") is True,
        epoch=checked_integer(message.get("epoch"), 0, MOST_COUNT),
        done=checked_integer(message.get("done"), 0, MOST_COUNT),
        made=checked_integer(message.get("made"), 0, MOST_COUNT),
        at=None if at is None else checked_integer(at, 0, MOST_COUNT),
        members=parse_members(message.get("members"), workers),
        addresses=parse_addresses(message.get("addresses"), workers),
        place=parse_place(message.get("place")),
    )


def parse_place(value: object) -> tuple[int, int]:
    """Parses the epoch of `fit` and the batch."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not a place")
    epoch, batch = (checked_integer(number, 0, MOST_COUNT) for number in value)
    return epoch, batch


def parse_members(value: object, workers: int) -> tuple[int, ...]:
    """Parses distinct ranks in ascending order."""
    if not isinstance(value, list) or len(value) > workers:
        raise ValueError("not a list of members")
    ranks = [checked_integer(rank, 0, workers - 1) for rank in value]
    if ranks != sorted(set(ranks)):
        raise ValueError("members out of order")
    return tuple(ranks)


def parse_addresses(value: object, workers: int) -> dict[int, Address]:
    """Parses (host, port) by rank."""
    if not isinstance(value, dict) or len(value) > workers:
        raise ValueError("not a table of addresses")
    ranks = [
        checked_integer(int(checked_text(rank, 20)), 0, workers - 1) for rank in value
    ]
    return dict(zip(ranks, map(checked_address, value.values()), strict=True))


def judge(view: View, answer: ViewReply, update: int | None = None) -> str:
    """Judges what the reply of a supposed member means to a host with `view`.

    `update` is that of the all-reduce that this host is in, if any.
    """
    if answer.session != view.session or not answer.is_in:
        return GONE
    if view.rank not in answer.members and answer.epoch >= view.epoch:
        return OUT
    if update is not None and answer.done >= update and answer.epoch > view.epoch:
        return DONE
    return ALIVE
