"""Manifests for `kubectl apply -f -`: an Indexed Job or a JobSet, and its Secret.

Pod i is worker i: Kubernetes gives it JOB_COMPLETION_INDEX=i and a name, so that worker
0 has an address before it runs. A Job's pods are named by a Service of their own; a
JobSet's by the controller's (https://jobset.sigs.k8s.io, installed beside Kubernetes),
which also starts all pods again at once. The Secret holds the job's key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tfdp.cluster.launchers import DEFAULT_PORT
from tfdp.cluster.restart import START_AGAIN
from tfdp.launch.environment import UNBUFFERED, device_variables
from tfdp.launch.pods import SECRET_ENTRY, Volume, checked_image, pod
from tfdp.launch.program import Program

__all__ = ["job_name", "manifest"]

# A pod's name, the Job's with "-INDEX", is a DNS label of at most 63 characters.
MOST_NAME_CHARACTERS = 52
# A JobSet's is NAME-workers-0-INDEX-XXXXX.
MOST_JOBSET_CHARACTERS = 40
REPLICATED_JOB = "workers"
LABEL = "tfdp-job"


def manifest(
    program: Program,
    image: str,
    *,
    workers: int,
    devices_per_worker: int | None = None,
    port: int | None = None,
    grace_seconds: float = 5.0,
    max_restarts: int = 0,
    gpus: int = 0,
    volumes: Sequence[Volume] = (),
    as_jobset: bool = False,
    job_key: str,
) -> list[dict[str, Any]]:
    """The Service, the Secret and the Job; or the Secret and the JobSet.

    Args:
      image: container image that holds Python, tfdp and the program.
      workers: pods, at least 1, all running at the same time.
      port: of worker 0, in its pod.
      max_restarts: how many failures of the group may be followed by a restart; 0:
        the first failed pod ends the Job.
      gpus: of NVIDIA, for each pod.
      volumes: claims that all pods mount.
      as_jobset: a JobSet in the Job's place.
      job_key: see `Cluster`.

    Raises:
      ConfigurationError: when the image's name is empty or holds spaces.
    """
    name, port = job_name(program), port or DEFAULT_PORT
    if as_jobset:
        name = name[:MOST_JOBSET_CHARACTERS].strip("-")
    first = f"{name}-{REPLICATED_JOB}-0-0" if as_jobset else f"{name}-0"
    spec = pod(
        checked_image(image),
        program.command("python"),
        variables={
            **UNBUFFERED,
            "TFDP_WORKERS": str(workers),
            "TFDP_COORDINATOR": f"{first}.{name}:{port}",
            **device_variables(devices_per_worker),
        },
        secret=name,
        port=port,
        grace_seconds=grace_seconds,
        gpus=gpus,
        volumes=volumes,
    )
    secret = _secret(name, job_key)
    if as_jobset:
        return [secret, _jobset(name, workers, spec, max_restarts)]
    job = _job(name, workers, {"subdomain": name, **spec}, max_restarts)
    return [_service(name, port), secret, job]


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


def _indexed(name: str, workers: int, pod: dict[str, Any]) -> dict[str, Any]:
    """What the Job alone and the one in a JobSet have in common."""
    return {
        "completions": workers,
        "parallelism": workers,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": {LABEL: name}}, "spec": pod},
    }


def _job(
    name: str, workers: int, pod: dict[str, Any], max_restarts: int
) -> dict[str, Any]:
    spec = _indexed(name, workers, pod)
    if max_restarts:
        # With 0 the first failed pod ends the Job, which stops the others. Kubernetes
        # replaces pod by pod, and counts each; one that fails takes all with it.
        spec["backoffLimit"] = max_restarts * workers
        spec["podFailurePolicy"] = {"rules": _rules("Ignore", pod)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "spec": spec,
    }


def _jobset(
    name: str, workers: int, pod: dict[str, Any], max_restarts: int
) -> dict[str, Any]:
    job = _indexed(name, workers, pod)
    failures: dict[str, Any] = {"maxRestarts": max_restarts}
    if max_restarts:
        # The Job ends for a reason of its own, which the JobSet does not count.
        job["podFailurePolicy"] = {"rules": _rules("FailJob", pod)}
        failures["rules"] = [
            {
                "name": "saved",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ]
    replicated = {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {LABEL: name}},
        "spec": {
            "failurePolicy": failures,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [replicated],
        },
    }


def _rules(action: str, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """What is not counted: a pod that has saved, or whose machine was wanted back."""
    codes = {
        "containerName": pod["containers"][0]["name"],
        "operator": "In",
        "values": [START_AGAIN],
    }
    return [
        {"action": action, "onExitCodes": codes},
        {
            "action": action,
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
