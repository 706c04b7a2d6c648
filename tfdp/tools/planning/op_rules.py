"""What ops do with memory, and how much they compute, by their kind.

From the kernels for CPUs in TensorFlow's sources (`tensorflow/core/kernels`): which
ones hand their input on, and which ones write into it when nobody else holds it
(`forward_input_or_allocate_output`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdp._private.op_types import ADDS

__all__ = [
    "CONVOLUTIONS",
    "Tensor",
    "access_of",
    "flops_of",
    "most_bytes",
    "reused_inputs",
    "shared_input",
]

# The first output is the first input.
PASSED_ON = frozenset(
    "Bitcast CheckNumerics EnsureShape ExpandDims Identity PlaceholderWithDefault "
    "PreventGradient Reshape Snapshot Squeeze StopGradient".split()
)
# The same where it is a run of whole rows.
ROWS = frozenset("Slice StridedSlice".split())
PIECES = frozenset("Split SplitV Unpack".split())
# What they make is as large as all that they read.
JOINED = frozenset("ConcatV2 DynamicStitch Pack ParallelDynamicStitch".split())
# An output may lie where an input of its size lay. Each was measured (the peak of a
# process while one runs). `FusedBatchNormV3` and its gradient are not among them: their
# sources ask for it, oneDNN's kernels, which run in their place on x86, do not.
IN_PLACE = frozenset(
    "Abs Add AddN AddV2 BiasAdd Ceil ClipByValue Cos Div DivNoNan Elu EluGrad Erf Exp "
    "Expm1 Floor Inv InvGrad LeakyRelu LeakyReluGrad Log Log1p LogSoftmax LogicalAnd "
    "LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg OnesLike Pow RealDiv "
    "Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad "
    "Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax Softplus "
    "SoftplusGrad Softsign SoftsignGrad SparseSoftmaxCrossEntropyWithLogits Sqrt "
    "SqrtGrad Square SquaredDifference Sub Tanh TanhGrad ZerosLike".split()
)
CONVOLUTIONS = {
    # kind -> which of (inputs..., output) is the filter, and which the smaller image
    "Conv2D": (1, -1),
    "Conv3D": (1, -1),
    "_FusedConv2D": (1, -1),
    "Conv2DBackpropInput": (1, 2),
    "Conv2DBackpropFilter": (-1, 2),
    "Conv3DBackpropInputV2": (1, 2),
    "Conv3DBackpropFilterV2": (-1, 2),
    "DepthwiseConv2dNative": (1, -1),
    "DepthwiseConv2dNativeBackpropInput": (1, 2),
    "DepthwiseConv2dNativeBackpropFilter": (-1, 2),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is known of a tensor before the step runs.

    Args:
      shape: its dimensions; None: how many, or how long, is not known.
      element_bytes: of one element; 0 where it has no memory of its own.
    """

    shape: tuple[int, ...] | None
    element_bytes: int

    @property
    def elements(self) -> int:
        """How many numbers; 0 where that is not known."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Its memory."""
        return self.elements * self.element_bytes


def access_of(kind: str) -> str:
    """What is done to a variable: "read", "assign" or "add"; "": something else.

    >>> access_of("AssignSubVariableOp")
    'add'
    """
    if kind in ADDS:
        return "add"
    return {"ReadVariableOp": "read", "AssignVariableOp": "assign"}.get(kind, "")


def shared_input(
    kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], place: int
) -> int | None:
    """The input whose memory output `place` is; None: it has memory of its own."""
    if not inputs:
        return None
    if kind == "IdentityN":
        return place
    if kind in PASSED_ON:
        return 0
    if kind == "Cast" and inputs[0].element_bytes == outputs[0].element_bytes:
        return None  # to another type of that size; to the same one is an Identity
    if kind in ROWS and _is_run_of_rows(inputs[0].shape, outputs[place].shape):
        return 0
    if kind in PIECES:
        whole = inputs[1] if kind == "Split" else inputs[0]
        if _is_run_of_rows(whole.shape, outputs[place].shape):
            return 1 if kind == "Split" else 0
    if kind in ("Sum", "BroadcastTo", "Max", "Mean", "ConcatV2"):
        return 0 if inputs[0].shape and inputs[0].shape == outputs[0].shape else None
    return None


def _is_run_of_rows(
    whole: tuple[int, ...] | None, part: tuple[int, ...] | None
) -> bool:
    if whole is None or part is None or not whole:
        return False
    return whole[1:] in (part, part[1:] if len(part) == len(whole) else None)


def most_bytes(kind: str, read_bytes: Sequence[int]) -> int:
    """What an output takes at most whose shape only the running step knows.

    Args:
      kind: of op.
      read_bytes: of its inputs.

    >>> most_bytes("ConcatV2", [8, 8, 4]), most_bytes("GatherV2", [8, 4])
    (20, 8)
    """
    return sum(read_bytes) if kind in JOINED else max(read_bytes, default=0)


def reused_inputs(kind: str, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """The inputs whose memory an output may take over."""
    return tuple(range(len(inputs))) if kind in IN_PLACE else ()


def flops_of(
    kind: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    transposes_first: bool = False,
) -> float:
    """Multiplications and additions; those of element-wise ops one per element.

    >>> a, b, c = Tensor((2, 3), 4), Tensor((3, 5), 4), Tensor((2, 5), 4)
    >>> flops_of("MatMul", [a, b], [c])
    60.0
    """
    if not outputs or shared_input(kind, inputs, outputs, 0) is not None:
        return 0.0
    if kind in ("MatMul", "BatchMatMulV2", "BatchMatMul", "_FusedMatMul"):
        shape = inputs[0].shape
        if not shape or len(shape) < 2:
            return 0.0
        inner = shape[-2] if transposes_first else shape[-1]
        return 2.0 * outputs[0].elements * inner
    if kind == "Einsum":
        sizes = [t.elements for t in (*inputs, outputs[0])]
        # Exact where no dimension is in all three; one that is counts by its root.
        return 2.0 * math.sqrt(math.prod(map(float, sizes))) if len(sizes) > 2 else 0.0
    if kind in CONVOLUTIONS:
        of_filter, of_image = CONVOLUTIONS[kind]
        tensors = [*inputs, outputs[0]]
        if max(of_filter, of_image) >= len(inputs):
            return 0.0
        weights, image = tensors[of_filter].shape, tensors[of_image]
        if not weights or not image.shape:
            return 0.0
        # Each number of the smaller image is made of one filter's reach.
        return 2.0 * image.elements * math.prod(weights[:-1]) / _groups(kind, weights)
    return float(sum(output.elements for output in outputs))


def _groups(kind: str, weights: tuple[int, ...]) -> float:
    """A filter of a depthwise convolution sees one channel."""
    return float(weights[-2]) if kind.startswith("Depthwise") else 1.0
