"""`Method`: the interface of a compression. A tenth is one file that implements it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, TypeAlias

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.plan.communication import ACROSS
from tfdp.plan.compression import Compression

# What a method keeps of a variable from step to step, by name.
Slots: TypeAlias = Mapping[str, tf.Tensor]


class Peers(Protocol):
    """Those who exchange what is compressed, as one of them sees them.

    Every one of them makes the same calls in the same order, with tensors of the same
    shapes.
    """

    @property
    def size(self) -> int:
        """How many there are, at least 2."""

    @property
    def place(self) -> int:
        """Which one this is, 0 to `size` - 1."""

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all, alike on all; float32."""

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        """Everybody's int32 tensor, side by side: [size, ...]."""

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As `gather`; and what is there as soon as `words` are on their way."""

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """Row i goes to peer i; what comes back are the rows that are for this one.

        Args:
          rows: int32, [size, ...].
        """


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """What one exchange made of the values of several variables.

    Args:
      sums: over all peers, alike on all of them, bit for bit.
      left: what of this peer's values is not in the sums. Over all peers and variables
        the sums and what is left are the values, to the rounding of float32.
      slots: what the method keeps of each variable for the next step.
      telling: what is not finite where a sum, a value of any peer or what is left of
        it is not; perhaps also where numbers are half of float32's largest. None: all
        of these are looked at.
      begun: what is there when the first message is on its way. The values of the next
        bucket are made then: not before, nor when it has arrived.
    """

    sums: Sequence[tf.Tensor]
    left: Sequence[tf.Tensor]
    slots: Sequence[Slots]
    telling: Sequence[tf.Tensor] | None = None
    begun: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Method(Compression, abc.ABC):
    """How values are made small, exchanged and made values again.

    Values are float32 tensors of a variable's shape: its gradient, with what earlier
    steps have left. A method makes TensorFlow ops of all that it does, so that it runs
    where the gradients are.
    """

    #: The slots that all peers have alike at all times. Others are numbers of the
    #: peer's own, in units of its gradients.
    alike_slots: ClassVar[frozenset[str]] = frozenset()

    def slots(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of what is kept of a variable of this `shape`; they start as 0."""
        return {}

    def values(
        self, gradients: Sequence[tf.Tensor], slots: Sequence[Slots]
    ) -> tuple[list[tf.Tensor], list[Slots]]:
        """What is to be sent but for what is left; and what is kept then."""
        return list(gradients), list(slots)

    @abc.abstractmethod
    def exchange(
        self,
        values: Sequence[tf.Tensor],
        slots: Sequence[Slots],
        peers: Peers,
        step: tf.Tensor,
    ) -> Exchanged:
        """The sums of what all peers send of their values, and what they do not send.

        Args:
          values: float32, of the variables' shapes.
          slots: what is kept of each.
          peers: who exchanges.
          step: how many exchanges there were, int64.
        """

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        """What each of so many peers sends in one exchange of values of these shapes.

        Bytes of the compressed gradients alone; as in a ring, where an all-reduce of n
        bytes sends 2 n (p - 1) / p.
        """
        return self.message_bytes(shapes) * (peers - 1)

    @abc.abstractmethod
    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """The bytes of one message for values of these shapes."""


def all_reduce_bytes(message_bytes: float, peers: int) -> float:
    """What each of so many peers sends of a message in an all-reduce by a ring."""
    return 2 * message_bytes * (peers - 1) / peers


# `MomentumCompression`: what an optimizer says that sends its momentum, made small.


@dataclasses.dataclass(frozen=True)
class MomentumCompression:
    """How the momentum m of an optimizer is sent, and from which update on.

    Args:
      method: what makes it small.
      across: "hosts" or "replicas"; see `Communication.compression_across`.
      beta_1: how much of m stays in an update.
      warmup_steps: the first updates, which send gradients as they are.

    Raises:
      ConfigurationError: when the method or `across` cannot be.
    """

    method: Method
    across: str
    beta_1: float
    warmup_steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ConfigurationError(
                "compression must be a value of tfdp.compression, such as "
                f"tfdp.compression.SignSGD(). Received: {self.method!r}."
            )
        has_momentum = getattr(self.method, "momentum_correction", None)
        if self.method.plain_steps or has_momentum:
            raise ConfigurationError(
                "compression of a momentum cannot begin later by itself (start_step; "
                "warmup_steps says when) nor bring another momentum "
                "(momentum_correction). Pass PowerSGD(..., start_step=0), or TopK "
                f"without it. Received: {self.method!r}."
            )
        if self.across not in ACROSS:
            raise ConfigurationError(
                "across must be 'hosts' (one momentum of each host is sent) or "
                f"'replicas' (that of each). Received: {self.across!r}."
            )
