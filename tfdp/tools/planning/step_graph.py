"""A training step as plain values: ops, what they read, how many bytes they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

#: A tensor's place in the step: (op, output).
Place = tuple[int, int]

#: A note of a step: it has loops that turn as often as they like.
ENDLESS = "loops of which one turn is counted, for want of their number"
#: Another one: XLA compiles a part of it, as it does convolutions in groups on CPUs.
COMPILED = "functions that XLA compiles, counted as if it did not"
#: With these the peak may be much larger.
NOT_KNOWN = frozenset((COMPILED, ENDLESS))


@dataclasses.dataclass(frozen=True)
class StoredVariable:
    """What lies in memory between steps.

    Args:
      size_bytes: of this copy, or this shard.
      part: what it is: "weights", "slots" or "state".
      on_host: whether it is in the memory of the host, and not of the device.
    """

    size_bytes: int
    part: str
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of the step.

    Args:
      kind: TensorFlow's name of what it does, such as "MatMul".
      inputs: for each tensor that it reads (place of the op, place of its output).
      controls: places of the ops that end before it begins, besides.
      output_bytes: of each tensor that it makes.
      shares: for each output the place of the input whose memory it is, always; None:
        it has memory of its own.
      reuses: places of inputs whose memory an output of the same size takes over when
        nobody else needs it any more.
      variable: the place of the variable that it reads or writes; None: of none.
      access: of that variable: "read", "assign" (its memory becomes the last input's)
        or "add" (in place, or in a copy while somebody still holds what was read).
      scratch_bytes: what it needs while it runs, besides.
      flops: multiplications and additions.
      part: what its outputs are: "activations", "gradients", "exchange", "update".
      name: for messages.
      on_host: whether the host runs it, and not the device.
    """

    kind: str
    inputs: tuple[Place, ...] = ()
    controls: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    shares: tuple[int | None, ...] = ()
    reuses: tuple[int, ...] = ()
    variable: int | None = None
    access: str = ""
    scratch_bytes: int = 0
    flops: float = 0.0
    part: str = "activations"
    name: str = ""
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A step.

    Args:
      ops: in an order in which each op comes after those that it reads.
      variables: what is stored between steps.
      results: (place of the op, place of its output) that live until the step ends.
      notes: what is not known: words to how often.
      lies_in: variables that lie where the link has put them in the step before: place
        to that of what the link keeps. All that lie in one of these share its memory,
        and the link takes as much anew.
    """

    ops: tuple[Op, ...]
    variables: tuple[StoredVariable, ...] = ()
    results: tuple[Place, ...] = ()
    notes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lies_in: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Of all ops."""
        return sum(op.flops for op in self.ops)

    @property
    def stored_bytes(self) -> int:
        """Of all variables."""
        return sum(variable.size_bytes for variable in self.variables)
