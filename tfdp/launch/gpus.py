"""The GPUs of this machine, shared out among its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdp.cluster.nvidia import VISIBLE, ask_for_gpus, named_gpus
from tfdp.errors import ConfigurationError

__all__ = ["VISIBLE", "own_gpus", "share_of_gpus"]


def own_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a program started here would see, as CUDA names them.

    Args:
      environment: of the program.

    Returns:
      What CUDA_VISIBLE_DEVICES lists, where it is set; else what `nvidia-smi` lists;
      nothing where there is no such program.
    """
    named = named_gpus(environment)
    # Unique names: CUDA and the driver may count the GPUs in different orders.
    return ask_for_gpus("uuid") if named is None else named


def share_of_gpus(gpus: Sequence[str], workers: int, rank: int) -> dict[str, str]:
    """The variable that leaves one worker its own part of the GPUs; each as many.

    Args:
      gpus: of the machine.
      workers: on this machine.
      rank: of the worker.

    Raises:
      ConfigurationError: when the GPUs do not go round evenly.

    >>> share_of_gpus(["0", "1", "2", "3"], workers=2, rank=1)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    if workers == 1 or not gpus:
        return {}
    each, left = divmod(len(gpus), workers)
    if not each or left:
        raise ConfigurationError(
            f"{workers} workers cannot share {len(gpus)} GPUs evenly. Choose a number "
            f"of workers that divides {len(gpus)} (one worker drives all GPUs), or set "
            f"{VISIBLE}: to nothing for the CPU, or to the GPUs to use."
        )
    return {VISIBLE: ",".join(gpus[rank * each : (rank + 1) * each])}
