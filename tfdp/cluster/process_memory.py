"""The memory of this process, as Linux tells it."""

from __future__ import annotations

import pathlib

__all__ = ["forget_peak", "peak_bytes", "resident_and_peak_bytes", "resident_bytes"]


def resident_bytes() -> int:
    """Memory of this process that lies in RAM.

    Raises:
      OSError: the system does not tell.
    """
    return _status_bytes("VmRSS")[0]


def peak_bytes() -> int:
    """The most that it has been since the process began, or since `forget_peak`.

    Raises:
      OSError: the system does not tell.
    """
    return _status_bytes("VmHWM")[0]


def resident_and_peak_bytes() -> tuple[int, int]:
    """`resident_bytes` and `peak_bytes`, asked for once.

    Raises:
      OSError: the system does not tell.
    """
    resident, peak = _status_bytes("VmRSS", "VmHWM")
    return resident, peak


def forget_peak() -> None:
    """Starts the search for the peak anew (Linux: man 5 proc, clear_refs)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(*keys: str) -> list[int]:
    text = pathlib.Path("/proc/self/status").read_text("utf-8", "replace")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        return [int(fields[key].split()[0]) * 1024 for key in keys]
    except (KeyError, IndexError, ValueError) as error:
        raise OSError(
            0, f"/proc/self/status does not tell {', '.join(keys)}"
        ) from error
