"""Values of rounds that a quorum decides (`elastic_quorum`)."""

from __future__ import annotations

import dataclasses

from tfdp.hosts.host_link import Arrays


@dataclasses.dataclass(frozen=True)
class QuorumRules:
    """The same on all hosts.

    quorum         members that a round waits for; fewer if fewer are alive
    grace_seconds  how long it waits for the others then
    every          updates between two rounds
    kept_rounds    how many rounds a late host may miss before it is left out
    """

    quorum: int
    grace_seconds: float
    every: int
    kept_rounds: int


@dataclasses.dataclass(frozen=True)
class Round:
    """The means after `update`; the round before it was after update `before`."""

    before: int
    update: int
    means: Arrays


@dataclasses.dataclass(eq=False)
class Contribution:
    """A member's contribution; `is_out`: it follows another leader than this host."""

    update: int
    weight: float
    arrays: Arrays
    is_out: bool = False
