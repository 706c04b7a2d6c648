"""`Method`: the interface of a compression method."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, TypeAlias

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.plan.compression import Compression
from tfdp.plan.options import ACROSS

Tensors: TypeAlias = Sequence[tf.Tensor]
# A method's state of a variable, by name.
Slots: TypeAlias = Mapping[str, tf.Tensor]


class Peers(Protocol):
    """One peer's view of those that exchange compressed values.

    All peers make the same calls in the same order, with tensors of equal shapes.
    """

    @property
    def size(self) -> int:
        """The number of peers, at least 2."""

    @property
    def place(self) -> int:
        """This peer's index, 0 to `size` - 1."""

    def sum(self, tensors: Tensors) -> list[tf.Tensor]:
        """The float32 sums over all peers, the same on all."""

    def gather(self, words: tf.Tensor) -> tf.Tensor:
        """All peers' int32 tensors: [size, ...]."""

    def gather_ahead(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers like `gather`; also gives a tensor that exists once words travel."""

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends row i of int32 [size, ...] to peer i; the rows for this one."""


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """The results of one exchange of several variables.

    Args:
      sums: over all peers, the same bits on all of them.
      left: what the sums lack of this peer's values, to the rounding of float32.
      slots: the method's new state of each variable.
      telling: non-finite where a sum, a value of any peer or its `left` is; perhaps
        also where numbers are half of float32's largest. None: check all of these.
      begun: exists once the first message is in flight. The values of the next bucket
        are computed then, neither before nor after it has arrived.
    """

    sums: Tensors
    left: Tensors
    slots: Sequence[Slots]
    telling: Tensors | None = None
    begun: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Method(Compression, abc.ABC):
    """Encodes, exchanges and decodes values: gradients with residuals of earlier steps.

    Values are float32 in a variable's shape. A method consists of TensorFlow ops, which
    run where the gradients are.
    """

    #: The slots that are the same on all peers at all times. Others belong to the peer,
    #: in units of its gradients.
    replicated_slots: ClassVar[frozenset[str]] = frozenset()

    def slots(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the state of a variable of this `shape`; it starts as 0."""
        return {}

    def values(
        self, gradients: Tensors, slots: Sequence[Slots]
    ) -> tuple[list[tf.Tensor], list[Slots]]:
        """The values to send, without the residual, and the new slots."""
        return list(gradients), list(slots)

    @abc.abstractmethod
    def exchange(
        self, values: Tensors, slots: Sequence[Slots], peers: Peers, step: tf.Tensor
    ) -> Exchanged:
        """Sums all peers' values, of the variables' shapes, as far as they are sent.

        `step` is the number of earlier exchanges, int64.
        """

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        """The bytes of compressed gradients that each peer sends in one exchange.

        As in a ring, where an all-reduce of n bytes sends 2 n (p - 1) / p.
        """
        return self.message_bytes(shapes) * (peers - 1)

    @abc.abstractmethod
    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """The bytes of one message for values of these shapes."""


def all_reduce_bytes(message_bytes: float, peers: int) -> float:
    """The bytes that each peer sends of a message in a ring all-reduce."""
    return 2 * message_bytes * (peers - 1) / peers


@dataclasses.dataclass(frozen=True)
class MomentumCompression:
    """How an optimizer sends its compressed momentum m, and from which update on.

    `beta_1` is the share of m that an update keeps; the first `warmup_steps` updates
    send gradients uncompressed. For `across` see `Communication.compression_across`.
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


class SentMomenta(set[int]):
    """Ids of optimizers that sent their momentum in a step, instead of gradients."""
