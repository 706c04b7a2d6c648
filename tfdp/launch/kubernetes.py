"""The manifest of an Indexed Job, its Service and its Secret, for `kubectl apply -f -`.

Pod i of the Job is worker i: Kubernetes gives it JOB_COMPLETION_INDEX=i and the name
`JOB-i.SERVICE`, so that worker 0 has an address before it runs. The Secret holds the
job's key. JSON, which kubectl
reads as well as YAML.
"""

from __future__ import annotations

import math
import re
from typing import Any

from tfdp.cluster.job_key import JOB_KEY
from tfdp.cluster.launchers import DEFAULT_PORT
from tfdp.cluster.restart import START_AGAIN
from tfdp.errors import ConfigurationError
from tfdp.launch.environment import UNBUFFERED, device_variables
from tfdp.launch.program import Program

__all__ = ["job_name", "manifest"]

# A pod's name, the Job's with "-INDEX", is a DNS label of at most 63 characters.
MOST_NAME_CHARACTERS = 52
LABEL = "tfdp-job"
SECRET_ENTRY = "job-key"


def manifest(
    program: Program,
    image: str,
    *,
    workers: int,
    devices_per_worker: int | None = None,
    port: int | None = None,
    grace_seconds: float = 5.0,
    max_restarts: int = 0,
    job_key: str,
) -> dict[str, Any]:
    """A List of the Service, the Secret and the Job.

    Args:
      image: container image that holds Python, tfdp and the program.
      workers: pods, at least 1, all running at the same time.
      port: of worker 0, in its pod.
      max_restarts: how many failures of the group may be followed by a restart; 0:
        the first failed pod ends the Job.
      job_key: see `Cluster`.

    Raises:
      ConfigurationError: when the image's name is empty or holds spaces.
    """
    if not image or any(character.isspace() for character in image):
        raise ConfigurationError(
            "--kubernetes needs the name of a container image, as "
            f"registry.example/train:1. Received: {image!r}."
        )
    name, port = job_name(program), port or DEFAULT_PORT
    variables = {
        **UNBUFFERED,
        "TFDP_WORKERS": str(workers),
        "TFDP_COORDINATOR": f"{name}-0.{name}:{port}",
        **device_variables(devices_per_worker),
    }
    secret_place = {"name": name, "key": SECRET_ENTRY}
    container = {
        "name": "worker",
        "image": image,
        "command": program.command("python"),
        "env": [
            *({"name": key, "value": value} for key, value in variables.items()),
            {"name": JOB_KEY, "valueFrom": {"secretKeyRef": secret_place}},
        ],
        "ports": [{"name": "coordinator", "containerPort": port}],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(grace_seconds),
        "containers": [container],
    }
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            _service(name, port),
            _secret(name, job_key),
            _job(name, workers, pod, max_restarts),
        ],
    }


def _service(name: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "spec": {
            "clusterIP": "None",  # headless: a DNS name for every pod
            "selector": {LABEL: name},
            # Workers look for worker 0 while it still imports TensorFlow.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "coordinator", "port": port}],
        },
    }


def _secret(name: str, job_key: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "type": "Opaque",
        "stringData": {SECRET_ENTRY: job_key},
    }


def _job(
    name: str, workers: int, pod: dict[str, Any], max_restarts: int
) -> dict[str, Any]:
    spec = {
        "completions": workers,
        "parallelism": workers,
        "completionMode": "Indexed",
        # With 0 the first failed pod ends the Job, which stops the others. Kubernetes
        # replaces pod by pod, and counts each; one that fails takes all with it.
        "backoffLimit": max_restarts * workers,
        "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod},
    }
    if max_restarts:
        spec["podFailurePolicy"] = {"rules": _free_restarts(pod)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "spec": spec,
    }


def _free_restarts(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """What is not counted: a pod that has saved, or whose machine was wanted back."""
    codes = {
        "containerName": pod["containers"][0]["name"],
        "operator": "In",
        "values": [START_AGAIN],
    }
    return [
        {"action": "Ignore", "onExitCodes": codes},
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]


def job_name(program: Program) -> str:
    """A name that Kubernetes takes, from the program's.

    >>> job_name(Program("examples/My_Train.py"))
    'tfdp-my-train'
    """
    words = re.sub(r"[^a-z0-9]+", "-", program.name.lower())
    return f"tfdp-{words}"[:MOST_NAME_CHARACTERS].strip("-")
