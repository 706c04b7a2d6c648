"""Number types on the wire: types that travel as they are, and exact substitutes.

TensorFlow's collectives add bfloat16, float16, float32, float64, int32 and int64, and
gather all of these except bfloat16; GPUs add some in a wider one. Other types travel in
a wider one that holds every sum modulo the narrow type's range, or as pairs of reals,
and are converted back exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.exchange.packing import Tensors

Restore = Callable[[tf.Tensor], tf.Tensor]

SUMMED = {tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}
# Addition wraps equally in the wider type and, after the cast back, in the narrow one.
WIDENED = dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32)
WIDENED |= dict.fromkeys((tf.uint32, tf.uint64), tf.int64)
COMPLEX_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}
GATHERED = {tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}


def check_summable(dtype: tf.DType) -> None:
    """Raises `CollectiveError` for types without a sum: strings, booleans, ..."""
    if dtype in SUMMED or dtype in WIDENED or dtype in COMPLEX_PARTS:
        return
    raise CollectiveError(
        f"Cannot add tensors of type {dtype.name} over replicas. Allowed: "
        f"{', '.join(sorted(t.name for t in {*SUMMED, *WIDENED, *COMPLEX_PARTS}))}. "
        "Cast the tensor first (booleans to int32, for example)."
    )


def is_wider_float(dtype: tf.DType, wire_dtype: str | None) -> bool:
    """Whether floats of this type are larger than those of `wire_dtype`."""
    if wire_dtype is None or not dtype.is_floating:
        return False
    return dtype.size > tf.as_dtype(wire_dtype).size


def fitting_wire_dtype(tensors: Tensors, wire_dtype: str | None) -> str | None:
    """`wire_dtype` where it makes all of these tensors smaller, else None."""
    fits = all(is_wider_float(tensor.dtype, wire_dtype) for tensor in tensors)
    return wire_dtype if fits else None


def collective_sum_dtype(dtype: tf.DType, device: str, *, over_nccl: bool) -> tf.DType:
    """The type in which collectives on `device` add numbers of `dtype`.

    Mostly `dtype` itself. `over_nccl`: NCCL adds; else TensorFlow's ring does.
    """
    if not over_nccl and tf.DeviceSpec.from_string(device).device_type != "GPU":
        return dtype
    # NCCL could add bfloat16, but TensorFlow 2.21 does not pass it on
    # (`kValidDataTypes` of nccl_manager.cc), though the op takes it: the step would
    # fail. The ring adds with the kernel of `Add`, which MLIR does not generate.
    if dtype == tf.bfloat16:
        return tf.float32
    # For int32 that kernel expects its arguments in host memory (cwise_op_add_1.cc),
    # and the ring passes GPU addresses.
    return tf.int64 if dtype == tf.int32 and not over_nccl else dtype


def to_sum_wire(tensor: tf.Tensor) -> tuple[tf.Tensor, Restore]:
    """`tensor` in a type that collectives can add, and the inverse conversion.

    Raises:
      CollectiveError: when the type cannot be added (strings, booleans, ...).
    """
    dtype = tensor.dtype
    check_summable(dtype)
    if dtype in WIDENED:
        return tf.cast(tensor, WIDENED[dtype]), lambda result: tf.cast(result, dtype)
    if dtype in COMPLEX_PARTS:
        pairs = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], axis=-1)
        return pairs, lambda result: tf.complex(result[..., 0], result[..., 1])
    return tensor, lambda result: result


def to_gather_wire(tensor: tf.Tensor) -> tuple[tf.Tensor, Restore]:
    """`tensor` in a type that collectives can gather, and the inverse conversion.

    Raises:
      CollectiveError: when the type cannot be gathered.
    """
    dtype = tensor.dtype
    if dtype in GATHERED:
        return tensor, lambda result: result
    if dtype == tf.bfloat16:
        # Nothing is computed in flight, so any type of equal width carries its bits.
        return tf.bitcast(tensor, tf.float16), lambda result: tf.bitcast(result, dtype)
    if dtype in WIDENED or dtype == tf.bool:
        wide = WIDENED.get(dtype, tf.int32)
        return tf.cast(tensor, wide), lambda result: tf.cast(result, dtype)
    raise CollectiveError(
        f"Cannot gather tensors of type {dtype.name} over replicas. Allowed: "
        f"{', '.join(sorted(t.name for t in {*GATHERED, *WIDENED}))}, bfloat16, bool."
    )
