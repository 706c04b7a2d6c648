"""Creates the devices of a process, before TensorFlow starts."""

from __future__ import annotations

from tfdp.errors import DeviceError

# The most that each logical GPU takes of the one GPU; `tfdp selftest` takes a quarter.
SPLIT_GPU_MIB = 4096


def set_up_devices(
    device_type: str, count: int, *, may_split: bool = False
) -> list[str]:
    """Creates the devices; returns their names.

    Args:
      device_type: "cpu" makes `count` logical CPUs, "gpu" uses the first GPUs.
      may_split: whether a machine's only GPU is split into `count` logical ones.
    """
    import tensorflow as tf

    import tfdp

    if device_type == "cpu":
        # Hide the GPUs: only the logical CPUs are to be used.
        tf.config.set_visible_devices([], "GPU")
        return tfdp.use_virtual_devices(count)
    gpus = tf.config.list_physical_devices("GPU")
    if may_split and len(gpus) == 1 and count > 1:
        part = tf.config.LogicalDeviceConfiguration(memory_limit=SPLIT_GPU_MIB)
        tf.config.set_logical_device_configuration(gpus[0], [part] * count)
    elif len(gpus) < count:
        raise DeviceError(
            f"{count} GPUs were requested, but there are {len(gpus)}. Request fewer, "
            "or use --device-type cpu."
        )
    return [f"GPU:{index}" for index in range(count)]


def find_devices(count: int, intra_op_threads: int | None = None) -> list[str]:
    """The first GPUs, or logical CPUs where there are fewer.

    `intra_op_threads`: of an operation on CPUs; None: TensorFlow's default.
    """
    import tensorflow as tf

    import tfdp

    if len(tf.config.list_physical_devices("GPU")) >= count:
        return [f"GPU:{index}" for index in range(count)]
    if intra_op_threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    return tfdp.use_virtual_devices(count)
