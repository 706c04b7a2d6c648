"""Facts of this machine and versions of packages, without TensorFlow.

`tfdp info` prints them and every benchmark stores them with its results.
"""

from __future__ import annotations

import builtins
import importlib.metadata
import os
import pathlib
import platform

from tfdp._version import __version__

# The packages that determine tfdp's behaviour, with their distribution names; the
# first one found counts.
PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly"),
    "keras": ("keras",),
    "numpy": ("numpy",),
}


def installed_versions() -> dict[str, str | None]:
    """Versions of Python, tfdp and `PACKAGES`; None for a missing package."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "tfdp": __version__,
    }
    for package, distributions in PACKAGES.items():
        versions[package] = next(filter(None, map(_version, distributions)), None)
    return versions


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def notebook_restart_hint() -> str:
    """Advice for a notebook, in which TensorFlow stays initialized; "" elsewhere."""
    is_notebook = hasattr(builtins, "__IPYTHON__")  # IPython sets it
    text = " In a notebook, restart the kernel, and run this cell first."
    return text if is_notebook else ""


def describe_machine() -> dict[str, str | int | None]:
    """`system`, `processor`, `usable_cores` and `memory_bytes` (None: unknown)."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor_name(),
        "usable_cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
    }


def usable_cores() -> int:
    """The cores that this process may run on; a container may restrict them."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _processor_name() -> str:
    # platform.processor() is empty on most Linux systems.
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# Memory of this process on Linux; elsewhere these raise an OSError.


def resident_bytes() -> int:
    """The resident memory of this process."""
    return _status_bytes("VmRSS")[0]


def peak_bytes() -> int:
    """The peak of resident memory since the start, or since `forget_peak`."""
    return _status_bytes("VmHWM")[0]


def resident_and_peak_bytes() -> tuple[int, int]:
    """`resident_bytes` and `peak_bytes` from one read."""
    resident, peak = _status_bytes("VmRSS", "VmHWM")
    return resident, peak


def forget_peak() -> None:
    """Resets the peak (Linux: man 5 proc, clear_refs)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(*keys: str) -> list[int]:
    text = pathlib.Path("/proc/self/status").read_text("utf-8", "replace")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        return [int(fields[key].split()[0]) * 1024 for key in keys]
    except (KeyError, IndexError, ValueError) as error:
        missing = f"/proc/self/status does not report {', '.join(keys)}"
        raise OSError(0, missing) from error
