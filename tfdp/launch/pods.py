"""The pod of one worker: its container, GPUs and volumes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.cluster.job_key import JOB_KEY
from tfdp.errors import ConfigurationError

__all__ = ["SECRET_ENTRY", "Volume", "checked_image", "parse_volume", "pod"]

SECRET_ENTRY = "job-key"
# The resource of NVIDIA's device plugin.
GPU = "nvidia.com/gpu"
CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# NCCL hands over through shared memory, of which a container has 64 MiB.
SHARED_MEMORY = "/dev/shm"  # noqa: S108


@dataclasses.dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where the workers see it."""

    claim: str
    path: str


def parse_volume(text: str) -> Volume:
    """`CLAIM:/PATH`.

    Raises:
      ConfigurationError: when it is none, or Kubernetes has no such names.

    >>> parse_volume("records:/data")
    Volume(claim='records', path='/data')
    """
    claim, _, path = text.partition(":")
    if not CLAIM_NAME.fullmatch(claim) or not path.startswith("/") or ":" in path:
        raise ConfigurationError(
            "--volume needs CLAIM:/PATH, the name of a PersistentVolumeClaim and where "
            f"the workers are to see it. Received: {text!r}."
        )
    return Volume(claim, path)


def checked_image(image: str) -> str:
    """The image's name.

    Raises:
      ConfigurationError: when it is empty or holds spaces.
    """
    if not image or any(character.isspace() for character in image):
        raise ConfigurationError(
            "--kubernetes needs the name of a container image, as "
            f"registry.example/train:1. Received: {image!r}."
        )
    return image


def pod(
    image: str,
    command: Sequence[str],
    *,
    variables: Mapping[str, str],
    secret: str,
    port: int,
    grace_seconds: float,
    gpus: int = 0,
    volumes: Sequence[Volume] = (),
) -> dict[str, Any]:
    """The `spec` of a pod, which is not started again in its place.

    Args:
      image: that holds Python, tfdp and the program.
      command: of the container.
      variables: of its environment.
      secret: the name of the Secret with the job's key.
      port: of worker 0, where all meet.
      grace_seconds: between asking a pod to end and killing it.
      gpus: of NVIDIA, for this pod.
      volumes: claims to mount.
    """
    key = {"secretKeyRef": {"name": secret, "key": SECRET_ENTRY}}
    container: dict[str, Any] = {
        "name": "worker",
        "image": image,
        "command": list(command),
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": JOB_KEY, "valueFrom": key},
        ],
        "ports": [{"name": "coordinator", "containerPort": port}],
    }
    sources: list[tuple[str, dict[str, Any]]] = [
        (volume.path, {"persistentVolumeClaim": {"claimName": volume.claim}})
        for volume in volumes
    ]
    if gpus:
        container["resources"] = {"limits": {GPU: gpus}}
        sources.append((SHARED_MEMORY, {"emptyDir": {"medium": "Memory"}}))
    made: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(grace_seconds),
        "containers": [container],
    }
    if sources:
        container["volumeMounts"] = [
            {"name": f"volume-{place}", "mountPath": path}
            for place, (path, _) in enumerate(sources)
        ]
        made["volumes"] = [
            {"name": f"volume-{place}", **source}
            for place, (_, source) in enumerate(sources)
        ]
    return made
