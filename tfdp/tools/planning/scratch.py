"""What kernels allocate for themselves while they run.

Measured op by op, on an x86 CPU with two cores and oneDNN (TensorFlow 2.21): the peak
of the process while one op runs, less its output. Other CPUs differ, GPUs much.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.tools.planning.op_rules import CONVOLUTIONS, Tensor

__all__ = ["scratch_bytes_of"]

# Filters below this stay as they are; oneDNN brings larger ones into its own order.
LEAST_FILTER_BYTES = 2**18
# A product of matrices packs blocks of both, as large as half of them, or its result,
# or this; narrow ones are not packed.
MOST_PACKED_BYTES = 2**23
LEAST_PACKED_DIMENSION = 128
# The gradient of a depthwise filter: oneDNN has a kernel for up to 3 x 3. For larger
# ones it takes that of convolutions in groups, whose blocks are 16 x 16 channels, of
# which a group has one: 256 numbers for each (format aBCde16c16b, on AVX-512).
MOST_DEPTHWISE_SIDE = 3
CHANNELS_OF_BLOCK = 16


def scratch_bytes_of(
    kind: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    equation: str = "",
) -> int:
    """What a kernel allocates for itself while it runs.

    Args:
      kind: of op.
      inputs: its inputs.
      outputs: its outputs.
      equation: of an `Einsum`.

    >>> scratch_bytes_of("Conv2D", [Tensor((8, 9, 9, 512), 4),
    ...                             Tensor((3, 3, 512, 512), 4)], [])
    9437184
    """
    if kind == "MaxPoolGrad" and len(inputs) > 1:
        # The pooled image once more, and where each number came from, in 64 bits.
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
    """A gradient of a depthwise filter as a convolution in groups makes it.

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
    """Copies of what does not lie as a product of matrices wants it.

    An operand lies well as [batch, free, summed] or [batch, summed, free], the result
    as [batch, free of the first, free of the second].
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
