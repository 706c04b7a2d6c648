"""What a worker says when it waited for others in vain."""

from __future__ import annotations

from absl import logging

from tfdp.hosts.last_words import lost_another

__all__ = ["late_words", "say_lost"]


def late_words(workers: str, timeout_seconds: float) -> str:
    """That `workers` ("worker 1") did not come in time."""
    return f"{workers} did not arrive within {timeout_seconds:g} seconds"


def say_lost(rank: int, waited_seconds: float, exchange: str, reason: str) -> str:
    """The message of a wait that ended without the others; logged, too.

    TensorFlow buries the error of a Python call, or of a collective, in its own.
    """
    lost_another()
    message = (
        f"Worker {rank} waited {waited_seconds:.1f} seconds in {exchange} for the "
        f"others: {reason}. Training cannot go on without it; look at that worker's "
        "output for the first error."
    )
    logging.error("tfdp: %s", message)
    return message
