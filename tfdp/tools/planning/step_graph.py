"""A training step as plain data: ops, what they read, how many bytes they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

#: An output in the step: (place of the op, number of the output).
Place = tuple[int, int]

#: Notes of a step with which the peak may be much larger: loops of unknown length, and
#: functions compiled by XLA, such as grouped convolutions on CPUs.
ENDLESS = "loops whose number of iterations is unknown, counted as one iteration"
COMPILED = "functions that XLA compiles, counted as if it did not"
NOT_KNOWN = frozenset((COMPILED, ENDLESS))


@dataclasses.dataclass(frozen=True)
class StoredVariable:
    """A buffer that lives between steps.

    `size_bytes` of this copy or shard; `part`: "weights", "slots" or "state";
    `on_host`: whether it is in the host's memory instead of the device's.
    """

    size_bytes: int
    part: str
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of the step.

    Args:
      kind: TensorFlow's op type, such as "MatMul".
      inputs, controls: the tensors it reads; places of further ops that run before it.
      output_bytes: of each output.
      shares: for each output the input whose memory it always is; None: its own.
      reuses: inputs whose memory an output of the same size takes over when they have
        no other reader.
      variable, access: place of the variable that it accesses, and how: "read",
        "assign" (it adopts the last input's memory) or "add" (in place, or in a copy
        while its old value has readers).
      scratch_bytes: allocated only while it runs.
      flops: multiplications and additions.
      part: of its outputs: "activations", "gradients", "exchange", "update".
      on_host: whether the host runs it instead of the device.
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
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A step.

    Args:
      ops: in topological order.
      variables: buffers that live between steps.
      results: outputs that live until the step ends.
      notes: what is unknown -> how often.
      in_link_buffer: variable -> the buffer of a link that it shares since the previous
        step, with other variables; the link then allocates a new one.
    """

    ops: tuple[Op, ...]
    variables: tuple[StoredVariable, ...] = ()
    results: tuple[Place, ...] = ()
    notes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    in_link_buffer: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)
