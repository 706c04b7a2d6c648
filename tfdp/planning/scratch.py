"""What kernels allocate for themselves while they run.

Measured op by op, on an x86 CPU with two cores and oneDNN (TensorFlow 2.21): the peak
of the process while one op runs, less its output. Other CPUs differ, GPUs much.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.planning.op_rules import CONVOLUTIONS, Tensor

__all__ = ["scratch_bytes_of"]

# Filters below this stay as they are; oneDNN brings larger ones into its own order.
LEAST_FILTER_BYTES = 2**18
# A product of matrices packs blocks of both, as large as half of them, or its result,
# or this; narrow ones are not packed.
MOST_PACKED_BYTES = 2**23
LEAST_PACKED_DIMENSION = 128


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
