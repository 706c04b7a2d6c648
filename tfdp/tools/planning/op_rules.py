"""Memory behaviour and FLOPs of ops, by kind.

From TensorFlow's CPU kernels (`tensorflow/core/kernels`): which ones forward their
input, and which ones write into it when it has no other reader
(`forward_input_or_allocate_output`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdp._private.step_ops import ADDS

# The first output is the first input.
PASSED_ON = frozenset(
    "Bitcast CheckNumerics EnsureShape ExpandDims Identity PlaceholderWithDefault "
    "PreventGradient Reshape Snapshot Squeeze StopGradient".split()
)
# The same if the output is a run of whole rows.
ROWS = frozenset("Slice StridedSlice".split())
PIECES = frozenset("Split SplitV Unpack".split())
# The output is as large as all inputs together.
JOINED = frozenset("ConcatV2 DynamicStitch Pack ParallelDynamicStitch".split())
# An output may take over an input buffer of its size. Each was measured (peak of a
# process running the op). `FusedBatchNormV3` and its gradient are absent: their sources
# request it, but oneDNN's kernels, which replace them on x86, do not.
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
    """The static shape of a tensor; None: rank or a dimension is unknown.

    `element_bytes` is 0 where the tensor has no memory of its own.
    """

    shape: tuple[int, ...] | None
    element_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements; 0 if unknown."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.element_bytes


def access_of(kind: str) -> str:
    """How an op accesses a variable: "read", "assign" or "add"; "": otherwise."""
    if kind in ADDS:
        return "add"
    return {"ReadVariableOp": "read", "AssignVariableOp": "assign"}.get(kind, "")


def shared_input(
    kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], place: int
) -> int | None:
    """The input whose memory output `place` shares; None: it has its own."""
    if not inputs:
        return None
    if kind == "IdentityN":
        return place
    if kind in PASSED_ON:
        return 0
    if kind == "Cast" and inputs[0].element_bytes == outputs[0].element_bytes:
        return None  # a cast to the same type is an Identity
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
    """Upper bound of the bytes of an output whose shape is unknown until run time."""
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
    """Multiplications and additions; element-wise ops count one per element.

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
        # Exact if no dimension is in all three; one that is counts by its root.
        return 2.0 * math.sqrt(math.prod(map(float, sizes))) if len(sizes) > 2 else 0.0
    if kind in CONVOLUTIONS:
        of_filter, of_image = CONVOLUTIONS[kind]
        tensors = [*inputs, outputs[0]]
        if max(of_filter, of_image) >= len(inputs):
            return 0.0
        weights, image = tensors[of_filter].shape, tensors[of_image]
        if not weights or not image.shape:
            return 0.0
        # Each element of the smaller image takes one filter's reach.
        depth = weights[-2] if kind.startswith("Depthwise") else 1
        return 2.0 * image.elements * math.prod(weights[:-1]) / depth
    return float(sum(output.elements for output in outputs))


# Scratch memory, measured op by op on an x86 CPU with two cores and oneDNN (TensorFlow
# 2.21): process peak less the output. Other CPUs differ, GPUs much.

# oneDNN reorders only filters of at least this size.
LEAST_FILTER_BYTES = 2**18
# A matrix product packs blocks of both operands: as much as half of them, the result,
# or this, whichever is least; narrow matrices are not packed.
MOST_PACKED_BYTES = 2**23
LEAST_PACKED_DIMENSION = 128
# Gradient of a depthwise filter: oneDNN has a kernel for up to 3 x 3. Larger ones use
# the grouped convolution, with blocks of 16 x 16 channels of which a group has one: 256
# elements for each (format aBCde16c16b, on AVX-512).
MOST_DEPTHWISE_SIDE = 3
CHANNELS_OF_BLOCK = 16


def scratch_bytes_of(
    kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], equation: str = ""
) -> int:
    """Bytes that a kernel allocates while it runs; `equation` of an `Einsum`."""
    if kind == "MaxPoolGrad" and len(inputs) > 1:
        # The pooled image again, and a 64-bit argmax per element.
        return inputs[1].size_bytes + 8 * inputs[1].elements
    if kind == "DepthwiseConv2dNativeBackpropFilter" and outputs:
        return _blocks_of_groups(outputs[0])
    if kind in CONVOLUTIONS and not kind.startswith("Depthwise"):
        place = CONVOLUTIONS[kind][0]
        tensors = [*inputs, *outputs[:1]] if place < 0 else inputs
        size_bytes = tensors[place].size_bytes if tensors else 0
        return size_bytes if size_bytes >= LEAST_FILTER_BYTES else 0
    if kind == "MatMul" and len(inputs) == 2 and outputs:
        return _packed_bytes(inputs, outputs[0])
    if kind == "Einsum" and len(inputs) == 2 and outputs:
        return _transposed_bytes(inputs, outputs[0], equation)
    return 0


def _blocks_of_groups(of_filter: Tensor) -> int:
    """A depthwise filter's gradient computed as a grouped convolution.

    >>> _blocks_of_groups(Tensor((5, 5, 576, 1), 4)) / 1e6
    14.7456
    """
    if of_filter.shape is None or len(of_filter.shape) != 4:
        return 0
    height, width, channels, multiplier = of_filter.shape
    if max(height, width) <= MOST_DEPTHWISE_SIDE:
        return 0
    made = -(-multiplier // CHANNELS_OF_BLOCK) * CHANNELS_OF_BLOCK
    numbers = height * width * channels * CHANNELS_OF_BLOCK * made
    return numbers * of_filter.element_bytes


def _packed_bytes(inputs: Sequence[Tensor], output: Tensor) -> int:
    dimensions = [n for t in (*inputs, output) for n in t.shape or (0,)]
    if min(dimensions) < LEAST_PACKED_DIMENSION:
        return 0
    both = sum(t.size_bytes for t in inputs)
    return min(output.size_bytes, both // 2, MOST_PACKED_BYTES)


def _transposed_bytes(inputs: Sequence[Tensor], output: Tensor, equation: str) -> int:
    """Copies of operands whose layout a matrix product cannot use.

    It takes an operand as [batch, free, summed] or [batch, summed, free], and gives
    [batch, free of the first, free of the second].
    """
    left, arrow, result = equation.replace(" ", "").partition("->")
    first, comma, second = left.partition(",")
    if not arrow or not comma or "." in equation:
        return 0
    batch = [n for n in result if n in first and n in second]
    summed = [n for n in first if n in second and n not in result]
    size_bytes = 0
    free_of_both = []
    for labels, tensor in zip((first, second), inputs, strict=True):
        free = [n for n in labels if n in result and n not in batch]
        free_of_both += free
        if list(labels) not in (batch + free + summed, batch + summed + free):
            size_bytes += tensor.size_bytes
    return size_bytes + (list(result) != batch + free_of_both) * output.size_bytes
