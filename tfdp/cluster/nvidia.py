"""NVIDIA GPUs that the driver of this machine sees, whoever else may not.

TensorFlow trains on the CPU without an error where it cannot load CUDA.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
# TensorFlow then takes the memory of a GPU as it needs it, and leaves the rest to other
# processes.
ALLOW_GROWTH = ("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# A folder for each GPU, made by the driver itself.
DRIVER_FOLDER = pathlib.Path("/proc/driver/nvidia/gpus")
# What programs talk to the driver by; a container that was given no GPU has none.
CONTROL_FILES = (pathlib.Path("/dev/nvidiactl"), pathlib.Path("/dev/dxg"))
PROGRAM = "nvidia-smi"
QUERY_SECONDS = 20.0


def driver_gpus(folder: pathlib.Path = DRIVER_FOLDER) -> list[str]:
    """The models of the GPUs that the driver lists; nothing where there is no driver.

    Args:
      folder: where the driver lists them; else `nvidia-smi` is asked.

    Cost: a short file for each GPU, or a run of nvidia-smi of a second or so.
    """
    try:
        listed = [_model(gpu / "information") for gpu in sorted(folder.iterdir())]
    except OSError:
        listed = []
    return listed or query_gpus("name")


def query_gpus(what: str) -> list[str]:
    """What `nvidia-smi` says of each GPU; nothing where there is no such program.

    Args:
      what: as in `nvidia-smi --help-query-gpu`, such as "name" or "uuid".
    """
    said = _query(f"--query-gpu={what}", "--format=csv,noheader")
    return [line.strip() for line in said.splitlines() if line.strip()]


def gpu_links() -> str:
    """How GPUs are connected with each other, as `nvidia-smi` draws it; "" without."""
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
    """Those of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process.

    >>> usable_gpus(["A100", "A100"], {"CUDA_VISIBLE_DEVICES": "1"})
    ['A100']
    >>> usable_gpus(["A100", "A100"], {"CUDA_VISIBLE_DEVICES": "-1"})
    []
    """
    named = named_gpus(environment)
    return list(gpus if named is None else gpus[: len(named)])


def named_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists; None: it is not set, and all are meant."""
    if VISIBLE not in environment:
        return None
    named = [name.strip() for name in environment[VISIBLE].split(",")]
    # CUDA stops at the first name that is none: "-1" hides all.
    end = next((i for i, n in enumerate(named) if n in ("", "-1")), len(named))
    return named[:end]


def gpu_names(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA shows to this process, in its order, by unique names.

    Where `nvidia-smi` and CUDA count the GPUs of a machine in different orders the
    names may be exchanged, in the same way in all processes that see all of them.

    Args:
      environment: of the process.

    Returns:
      Such as "GPU-8a56a4bc-..."; nothing where `nvidia-smi` does not answer.

    Cost: a run of nvidia-smi of a second or so.
    """
    uuids = query_gpus("uuid")
    named = named_gpus(environment)
    if named is None or not uuids:
        return uuids
    return [_unique(name, uuids) for name in named]


def _unique(name: str, uuids: Sequence[str]) -> str:
    """The unique name of what CUDA_VISIBLE_DEVICES calls `name`; else `name` itself."""
    if name.isdecimal():
        return uuids[int(name)] if int(name) < len(uuids) else name
    # CUDA takes the beginning of one as well.
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
    """What to say where TensorFlow sees fewer GPUs than there are; None: nothing.

    Args:
      gpus: those of `driver_gpus`.
      seen: how many TensorFlow sees.
      built_with_cuda: whether this TensorFlow can use GPUs at all.
      environment: variables by name.
      reaches_driver: whether the driver's device files are there; None: looks.
    """
    usable = usable_gpus(gpus, environment)
    if seen >= len(usable):
        return None
    if reaches_driver is None:
        reaches_driver = any(path.exists() for path in CONTROL_FILES)
    counted = ", ".join(dict.fromkeys(usable))
    trains = f"TensorFlow sees {seen}" if seen else "TensorFlow trains on the CPU"
    said = f"The driver sees {len(usable)} GPU(s) ({counted}), and {trains}: "
    if not built_with_cuda:
        return (
            f"{said}this TensorFlow was built without CUDA. Install the other: pip "
            "uninstall tensorflow-cpu, then pip install 'tfdp[gpu]'."
        )
    if not reaches_driver:
        return (
            f"{said}this process has no device file of the driver. A container must "
            "be given the GPUs: docker run --gpus all, or the resource nvidia.com/gpu."
        )
    if VISIBLE in environment:
        return (
            f"{said}look whether {VISIBLE}={environment[VISIBLE]} names GPUs that are "
            "there (nvidia-smi -L), and whether the CUDA libraries are installed: pip "
            "install 'tfdp[gpu]'."
        )
    return (
        f"{said}the CUDA libraries are missing, or the driver is older than they are. "
        "pip install 'tfdp[gpu]' brings them; TensorFlow's own lines when it starts "
        "name the library (TF_CPP_MIN_LOG_LEVEL=0). To train on the CPU on purpose, "
        f"set {VISIBLE}=-1."
    )
