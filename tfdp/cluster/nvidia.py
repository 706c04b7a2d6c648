"""NVIDIA GPUs as the machine's driver reports them, and why TensorFlow sees fewer.

TensorFlow silently trains on the CPU if it cannot load CUDA.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Makes TensorFlow allocate GPU memory on demand, leaving the rest to other processes.
ALLOW_GROWTH = ("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# The driver makes a folder for each GPU.
DRIVER_FOLDER = pathlib.Path("/proc/driver/nvidia/gpus")
# The driver's control devices; a container without GPUs has none.
CONTROL_FILES = (pathlib.Path("/dev/nvidiactl"), pathlib.Path("/dev/dxg"))
PROGRAM = "nvidia-smi"
QUERY_SECONDS = 20.0


def driver_gpus(folder: pathlib.Path = DRIVER_FOLDER) -> list[str]:
    """The models of the driver's GPUs; may run nvidia-smi, for a second or so."""
    try:
        listed = [_model(gpu / "information") for gpu in sorted(folder.iterdir())]
    except OSError:
        listed = []
    return listed or query_gpus("name")


def query_gpus(what: str) -> list[str]:
    """`nvidia-smi`'s value of `what` ("name", "uuid") per GPU; empty without it."""
    output = _query(f"--query-gpu={what}", "--format=csv,noheader")
    return [line.strip() for line in output.splitlines() if line.strip()]


def gpu_links() -> str:
    """`nvidia-smi`'s drawing of the links between GPUs; "" without it."""
    return _query("topo", "-m")


def _query(*words: str) -> str:
    if shutil.which(PROGRAM) is None:
        return ""
    try:
        done = subprocess.run(
            (PROGRAM, *words),
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _model(information: pathlib.Path) -> str:
    for line in information.read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Model":
            return value.strip()
    return "NVIDIA GPU"


def usable_gpus(gpus: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
    named = named_gpus(environment)
    return list(gpus if named is None else gpus[: len(named)])


def named_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """The list in CUDA_VISIBLE_DEVICES; None: it is not set, so all are visible."""
    if VISIBLE not in environment:
        return None
    named = [name.strip() for name in environment[VISIBLE].split(",")]
    # CUDA stops at the first invalid name: "-1" hides all.
    end = next((i for i, n in enumerate(named) if n in ("", "-1")), len(named))
    return named[:end]


def gpu_names(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA shows to this process, in its order, by UUID ("GPU-8a...").

    Empty without a working `nvidia-smi`, which takes a second or so. If it and CUDA
    count GPUs in different orders, names are exchanged equally in all processes.
    """
    uuids = query_gpus("uuid")
    named = named_gpus(environment)
    if named is None or not uuids:
        return uuids
    return [_unique(name, uuids) for name in named]


def _unique(name: str, uuids: Sequence[str]) -> str:
    """The UUID of a CUDA_VISIBLE_DEVICES entry; else `name` itself."""
    if name.isdecimal():
        return uuids[int(name)] if int(name) < len(uuids) else name
    # CUDA accepts unique prefixes.
    full = [uuid for uuid in uuids if uuid.startswith(name)]
    return full[0] if len(full) == 1 else name


def explain_unseen_gpus(
    gpus: Sequence[str],
    seen: int,
    *,
    built_with_cuda: bool,
    environment: Mapping[str, str],
    reaches_driver: bool | None = None,
) -> str | None:
    """A message if TensorFlow sees fewer GPUs than `gpus` of the driver; else None.

    `reaches_driver`: whether the driver's device files exist; None: checks.
    """
    usable = usable_gpus(gpus, environment)
    if seen >= len(usable):
        return None
    if reaches_driver is None:
        reaches_driver = any(path.exists() for path in CONTROL_FILES)
    counted = ", ".join(dict.fromkeys(usable))
    trains = f"TensorFlow sees {seen}" if seen else "TensorFlow trains on the CPU"
    found = f"The driver sees {len(usable)} GPU(s) ({counted}), and {trains}: "
    if not built_with_cuda:
        return (
            f"{found}this TensorFlow was built without CUDA. Install the other: pip "
            "uninstall tensorflow-cpu, then pip install 'tfdp[gpu]'."
        )
    if not reaches_driver:
        return (
            f"{found}this process has no device file of the driver. A container must "
            "be given the GPUs: docker run --gpus all, or the resource nvidia.com/gpu."
        )
    if VISIBLE in environment:
        return (
            f"{found}check that {VISIBLE}={environment[VISIBLE]} names existing GPUs "
            "(nvidia-smi -L), and install the CUDA libraries: pip install 'tfdp[gpu]'."
        )
    return (
        f"{found}the CUDA libraries are missing, or the driver is older than they are. "
        "pip install 'tfdp[gpu]' brings them; TensorFlow's start names the library "
        f"(TF_CPP_MIN_LOG_LEVEL=0). To train on the CPU on purpose, set {VISIBLE}=-1."
    )
