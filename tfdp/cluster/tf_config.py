"""`TF_CONFIG`, TensorFlow's own description of a cluster.

Kubeflow, Vertex AI and SageMaker set it to JSON such as

    {"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]},
     "task": {"type": "worker", "index": 0}}

The chief is rank 0 and the workers follow; without a chief, worker 0 is.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from tfdp.cluster.claim import Claim, integer, present, shortened
from tfdp.errors import ClusterError
from tfdp.files.checked_json import parse_json

__all__ = ["read_tf_config"]

# In the order of their ranks. `master` is what older services call the chief.
TRAINING_TASKS = ("chief", "master", "worker")
REFUSED_TASKS = {
    "ps": "tfdp has no parameter servers, its workers exchange gradients with each "
    "other: start the job with workers only",
    "evaluator": "an evaluator takes no part in the training: evaluate in the "
    "workers with model.evaluate, or start the evaluator without tfdp",
}


def read_tf_config(environment: Mapping[str, str]) -> Claim | None:
    """The claim of `TF_CONFIG`; None when it is not set or names no cluster.

    Raises:
      ClusterError: when it is not the JSON described above, lists an address twice,
        or needs parameter servers or an evaluator.
    """
    found = present(environment, "TF_CONFIG")
    if not found:
        return None
    config = _parse(found["TF_CONFIG"])
    text = shortened(found["TF_CONFIG"])
    addresses = _addresses(config.get("cluster") or {}, text)
    if not any(addresses.values()):
        return None  # a service that trains on one machine sets it without a cluster
    kind, index = _task(config.get("task"), text)
    if kind in REFUSED_TASKS:
        raise ClusterError(
            f"TF_CONFIG makes this process a task of type {kind!r}: "
            f"{REFUSED_TASKS[kind]}. Received: {text}"
        )
    if addresses.get("ps"):
        raise ClusterError(
            f"TF_CONFIG lists parameter servers: {REFUSED_TASKS['ps']}. "
            f"Received: {text}"
        )
    if index >= len(addresses.get(kind, ())):
        raise ClusterError(
            f"TF_CONFIG says that this is {kind} {index}, but its cluster lists "
            f"{len(addresses.get(kind, ()))} of them. Received: {text}"
        )
    ranks = [
        (kind, index, address)
        for kind in TRAINING_TASKS
        for index, address in enumerate(addresses.get(kind, ()))
    ]
    return Claim(
        source="TF_CONFIG",
        found=found,
        workers=len(ranks),
        rank=[(kind, index) for kind, index, _ in ranks].index((kind, index)),
        coordinator=ranks[0][2],
    )


def _parse(text: str) -> dict[str, Any]:
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON: {error}. Received: {shortened(text)}"
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object. Received: {shortened(text)}"
        )
    return config


def _addresses(cluster: Any, text: str) -> dict[str, list[str]]:
    if not isinstance(cluster, dict) or not all(
        isinstance(listed, list) and all(isinstance(item, str) for item in listed)
        for listed in cluster.values()
    ):
        raise ClusterError(
            "TF_CONFIG's cluster must map task types to lists of 'host:port'. "
            f"Received: {text}"
        )
    training = [item for kind in TRAINING_TASKS for item in cluster.get(kind, ())]
    counts = collections.Counter(training)
    twice = sorted(item for item, count in counts.items() if count > 1)
    if twice:
        raise ClusterError(
            f"TF_CONFIG lists {shortened(', '.join(twice))} twice, so that more "
            "workers are counted than started. List every process once. "
            f"Received: {text}"
        )
    return cluster


def _task(task: Any, text: str) -> tuple[str, int]:
    kind = task.get("type") if isinstance(task, dict) else None
    index = str(task.get("index")) if isinstance(task, dict) else ""
    if kind not in (*TRAINING_TASKS, *REFUSED_TASKS) or not index.isdecimal():
        raise ClusterError(
            "TF_CONFIG's task must hold a type (chief or worker) and an index of at "
            f"least 0. Received: {text}"
        )
    number = integer({"TF_CONFIG's task index": index}, "TF_CONFIG's task index", 0)
    return kind, number or 0
