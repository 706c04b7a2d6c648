"""Detects a TPU and explains why it cannot be used, without TensorFlow."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Mapping, Sequence

# Each means that TPU cores are attached to this machine.
LOCAL_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
DEVICE_FILES = "/dev/accel*"


@dataclasses.dataclass(frozen=True)
class TPUSigns:
    """Evidence of a TPU."""

    #: For TensorFlow's resolver: "local" (this machine), a name, or `grpc://host:port`.
    address: str
    signs: tuple[str, ...]  # the variables and device files found


def find_tpu(
    environment: Mapping[str, str] | None = None,
    device_files: Sequence[str] | None = None,
) -> TPUSigns | None:
    """The TPU that the environment names; None: there is no sign of one.

    Signs: TPU_NAME, COLAB_TPU_ADDR, TPU_ACCELERATOR_TYPE, TPU_WORKER_ID,
    TPU_WORKER_HOSTNAMES, PJRT_DEVICE=TPU, and device files `/dev/accel*`.

    `environment` None takes this process's variables; `device_files` None finds them.

    >>> find_tpu({"TPU_ACCELERATOR_TYPE": "v5litepod-1"}, [])
    TPUSigns(address='local', signs=('TPU_ACCELERATOR_TYPE=v5litepod-1',))
    """
    environment = os.environ if environment is None else environment
    if device_files is None:
        device_files = sorted(glob.glob(DEVICE_FILES))
    names = [name for name in LOCAL_VARIABLES if environment.get(name)]
    signs = [f"{name}={environment[name]}" for name in names]
    if environment.get("PJRT_DEVICE", "").upper() == "TPU":
        signs.append("PJRT_DEVICE=TPU")
    signs += device_files
    address = "local" if signs else None
    if environment.get("COLAB_TPU_ADDR"):
        address = environment["COLAB_TPU_ADDR"]
        signs.insert(0, f"COLAB_TPU_ADDR={address}")
        address = address if "://" in address else f"grpc://{address}"
    if environment.get("TPU_NAME"):
        address = environment["TPU_NAME"]
        signs.insert(0, f"TPU_NAME={address}")
    return None if address is None else TPUSigns(address, tuple(signs))


INSTALL = (
    "Install TensorFlow's TPU build, with the TPU library of the same version, and "
    "nothing else of TensorFlow:\n"
    "    pip uninstall -y tensorflow tensorflow-cpu\n"
    "    pip install 'tfdp[tpu]' "
    "-f https://storage.googleapis.com/libtpu-tf-releases/index.html\n"
    "Then restart the Python process (Colab: Runtime > Restart session)."
)
CHOOSE = (
    "In Colab choose Runtime > Change runtime type > TPU. On a TPU VM the address is "
    "'local'; a TPU elsewhere needs its name or grpc://host:port."
)

# (pattern in the message, meaning, what to do). The first match is used.
FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"No OpKernel was registered to support Op 'ConfigureDistributedTPU'",
        "This TensorFlow was built without TPU support, or its TPU library (libtpu) "
        "was not found (tensorflow#89797, #96203).",
        INSTALL,
    ),
    (
        r"neither a type of a primitive operation nor a name of a function",
        "The TPU's own software is of another version than this TensorFlow.",
        "Use the TensorFlow version that the TPU runtime was made for, or make the "
        "TPU anew with a runtime for this version.",
    ),
    (
        r"libtpu.*(version|mismatch|undefined symbol)|"
        r"(version|undefined symbol|mismatch).*libtpu|"
        r"PJRT.*version",
        "The TPU library (libtpu) is of another version than this TensorFlow.",
        INSTALL,
    ),
    (
        r"libtpu\S*: cannot open|libtpu.*not found|find.*libtpu",
        "The TPU library (libtpu) is not installed.",
        INSTALL,
    ),
    (
        r"Please provide a TPU Name",
        "No address was given and nothing here names a TPU (tensorflow#70827).",
        CHOOSE,
    ),
    (
        r"already in use|resource busy|lockfile|Couldn't open.*accel",
        "Another process holds the TPU: one process at a time can use it.",
        "End the other process (a notebook, a crashed run), or restart the runtime.",
    ),
    (
        r"worker addresses, got",
        "The TPU library was given other workers than there are.",
        "Unset TPU_PROCESS_ADDRESSES and CLOUD_TPU_TASK_ID before TensorFlow starts.",
    ),
    (
        r"UNAVAILABLE|failed to connect|Connection refused|Socket closed|Deadline|"
        r"Name or service not known|urlopen error",
        "The address of the TPU does not answer, or cannot be resolved.",
        f"Is the name right, does the TPU run, is it in the same network? {CHOOSE}",
    ),
    (
        r"TPUs not found|No TPU devices|could not find.*TPU",
        "TensorFlow runs, but finds no TPU core.",
        CHOOSE,
    ),
)


def explain_tpu_failure(
    message: str,
    address: str,
    signs: Sequence[str] = (),
    installed: Mapping[str, str] | None = None,
) -> str:
    """Why a TPU could not be used, by TensorFlow's `message`, and what to do."""
    meaning, advice = "", "tfdp has no explanation for the message. " + CHOOSE
    for pattern, means, todo in FAILURES:
        if re.search(pattern, message, re.I | re.S):
            meaning, advice = means + " ", todo
            break
    found = ", ".join(signs) or "nothing in the environment"
    versions = installed or {}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    first_line = message.strip().splitlines()[0][:300] if message.strip() else ""
    return (
        f"The TPU at {address!r} cannot be used. {meaning}{advice}\n"
        f"Signs of a TPU: {found}. Installed: {packages or 'unknown'}.\n"
        "To train without it: tfdp.DataParallelStrategy().\n"
        f"TensorFlow said: {first_line}"
    )
