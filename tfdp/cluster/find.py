"""`find_cluster`: combines and checks the claims of all launchers' variables."""

from __future__ import annotations

import collections
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.cluster.addresses import FIRST_PORT, LAST_PORT, with_slurm_address
from tfdp.cluster.description import (
    Claim,
    Cluster,
    integer,
    join_address,
    present,
    shortened,
)
from tfdp.cluster.job_key import find_job_key
from tfdp.cluster.launchers import (
    read_kubernetes,
    read_mpich,
    read_open_mpi,
    read_tfdp,
    read_torchrun,
)
from tfdp.errors import ClusterError
from tfdp.files.checked_json import parse_json

# `srun` gives every task SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST. A
# batch script or `salloc` shell is one process with the variables of the whole job and
# SLURM_PROCID=0 or none: only a step describes a cluster.


_Names = tuple[str, ...]
TASKS: _Names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NODES: _Names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NODE_COUNTS: _Names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
JOB: _Names = ("SLURM_JOB_ID", "SLURM_JOBID")
STEP: _Names = ("SLURM_STEP_ID", "SLURM_STEPID")
MOST_HOSTS = 100_000  # above the limit of one Slurm cluster (65,533)
MOST_BRACKETS = 8
MOST_DIGITS = 12


def read_slurm(environment: Mapping[str, str]) -> Claim | None:
    """The claim of a Slurm step; None outside one.

    A batch script of several nodes gets an incomplete claim, so that a missing `srun`
    is an error and does not train on the first node only.
    """
    found = present(environment, "SLURM_PROCID")
    for names in (TASKS, NODES, NODE_COUNTS, JOB, STEP):
        found |= dict(list(present(environment, *names).items())[:1])
    rank = integer(found, "SLURM_PROCID", least=0)
    workers = _first_integer(found, TASKS, least=1)
    nodes = _first_integer(found, NODE_COUNTS, least=1)
    # Process 0 of a job without a step is the batch script.
    if not rank and not present(environment, *STEP, NODES[0]):
        if nodes is None or nodes == 1:
            return None
        missing: _Names = (
            f"a job step: this is the batch script of {nodes} nodes. Start the program "
            "with `srun python ...`, or set TFDP_WORKERS=1 to use this node alone",
        )
        return Claim("Slurm", found, missing=missing)

    hosts = next((found[name] for name in NODES if name in found), None)
    job = _first_integer(found, JOB, least=0)
    missing = tuple(
        " or ".join(accepted)
        for accepted, value in (
            (("SLURM_PROCID",), rank),
            (TASKS[:2], workers),
            (NODES[:2], hosts),
            (JOB[:1], job),
        )
        if value is None
    )
    coordinator, name = None, ""
    if hosts is not None and job is not None:
        step = _first_integer(found, STEP, least=0) or 0
        name = f"Slurm {job}.{step}"
        coordinator = join_address(expand_hosts(hosts)[0], slurm_port(job, step))
    return Claim(
        source="Slurm",
        found=found,
        workers=workers,
        rank=rank,
        coordinator=coordinator,
        missing=missing,
        one_task_per_node=workers is not None and workers == nodes,
        job=name,
    )


def slurm_port(job: int, step: int = 0) -> int:
    """The coordinator's port, 20000..29999, derived equally on all hosts.

    It depends on the job's id, as jobs may share a node, and on the step's. Ids of
    concurrent jobs are close to each other; steps differ by 101.

    >>> slurm_port(200505), slurm_port(200505, step=1)
    (20505, 20606)
    """
    return FIRST_PORT + (job + 101 * step) % (LAST_PORT + 1 - FIRST_PORT)


def expand_hosts(text: str) -> list[str]:
    """The hosts of Slurm's compressed list, in order; a ClusterError for bad lists.

    >>> expand_hosts("node[01-03,7],other")
    ['node01', 'node02', 'node03', 'node7', 'other']
    >>> expand_hosts("rack[1-2]n[0-1]-ib")
    ['rack1n0-ib', 'rack1n1-ib', 'rack2n0-ib', 'rack2n1-ib']
    """
    # Commas in brackets do not separate hosts.
    items = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", text)
    if not items or ",".join(items) != text.strip():
        raise _bad_list(text)
    parsed = [_parse_item(item, text) for item in items]
    count = sum(
        math.prod(sum(len(numbers) for _, numbers in ranges) for ranges in brackets)
        for _, brackets in parsed
    )
    if count > MOST_HOSTS:
        raise ClusterError(
            f"Slurm's list of nodes names {count} hosts; at most {MOST_HOSTS} can be "
            f"meant. Received: {shortened(text)!r}."
        )
    return [host for names, ranges in parsed for host in _expand(names, ranges)]


_Part = tuple[int, range]  # zero-padded width, and numbers, of one part of a bracket


def _parse_item(item: str, text: str) -> tuple[list[str], list[list[_Part]]]:
    """The text around the brackets, and the parts of each bracket."""
    pieces = re.split(r"\[([^\]]*)\]", item)
    if len(pieces) > 2 * MOST_BRACKETS + 1:
        raise _bad_list(text)
    brackets = []
    for ranges in pieces[1::2]:
        parts = []
        for part in ranges.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            if not match:
                raise _bad_list(text)
            first, last = match[1], match[2] or match[1]
            if max(len(first), len(last)) > MOST_DIGITS or int(last) < int(first):
                raise _bad_list(text)
            # The first number sets the width: 01-03, 098-102.
            parts.append((len(first), range(int(first), int(last) + 1)))
        brackets.append(parts)
    return pieces[::2], brackets


def _expand(names: Sequence[str], brackets: Sequence[Sequence[_Part]]) -> list[str]:
    numbers = [
        [str(number).zfill(width) for width, numbers in parts for number in numbers]
        for parts in brackets
    ]
    return [
        "".join(itertools.chain(*zip(names, chosen, strict=False), names[-1:]))
        for chosen in itertools.product(*numbers)
    ]


def _bad_list(text: str) -> ClusterError:
    what = "Slurm's list of nodes must look like node[01-03,7],other."
    return ClusterError(f"{what} Received: {shortened(text)!r}.")


def _first_integer(found: Mapping[str, str], names: _Names, least: int) -> int | None:
    return next((integer(found, name, least) for name in names if name in found), None)


# `TF_CONFIG`, set by Kubeflow, Vertex AI and SageMaker, is JSON such as
#
#     {"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]},
#      "task": {"type": "worker", "index": 0}}
#
# In rank order: the chief (`master` in older services), if any, then the workers.
TRAINING_TASKS = ("chief", "master", "worker")
REFUSED_TASKS = {
    "ps": "tfdp has no parameter servers, its workers exchange gradients with each "
    "other: start the job with workers only",
    "evaluator": "an evaluator takes no part in the training: evaluate in the "
    "workers with model.evaluate, or start the evaluator without tfdp",
}


def read_tf_config(environment: Mapping[str, str]) -> Claim | None:
    """The claim of `TF_CONFIG`; None if it is not set or names no cluster."""
    found = present(environment, "TF_CONFIG")
    if not found:
        return None
    text = shortened(found["TF_CONFIG"])
    try:
        config: Any = parse_json(found["TF_CONFIG"])
    except ValueError as error:
        what = f"TF_CONFIG is not JSON: {error}"
        raise ClusterError(f"{what}. Received: {text}") from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG must be a JSON object. Received: {text}")
    addresses = _addresses(config.get("cluster") or {}, text)
    if not any(addresses.values()):
        return None  # a one-machine service sets it without a cluster
    kind, index = _task(config.get("task"), text)
    if kind in REFUSED_TASKS:
        raise ClusterError(
            f"TF_CONFIG makes this process a task of type {kind!r}: "
            f"{REFUSED_TASKS[kind]}. Received: {text}"
        )
    if addresses.get("ps"):
        what = f"TF_CONFIG lists parameter servers: {REFUSED_TASKS['ps']}"
        raise ClusterError(f"{what}. Received: {text}")
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


def _addresses(cluster: Any, text: str) -> dict[str, list[str]]:
    lists = cluster.values() if isinstance(cluster, dict) else [None]
    is_list = all(isinstance(listed, list) for listed in lists)
    if not is_list or not all(
        isinstance(item, str) for item in itertools.chain(*lists)
    ):
        raise ClusterError(
            "TF_CONFIG's cluster must map task types to lists of 'host:port'. "
            f"Received: {text}"
        )
    training = [item for kind in TRAINING_TASKS for item in cluster.get(kind, ())]
    counts = collections.Counter(training)
    if twice := sorted(item for item, count in counts.items() if count > 1):
        raise ClusterError(
            f"TF_CONFIG lists {shortened(', '.join(twice))} twice. List every process "
            f"once. Received: {text}"
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


# The first one that states a rank is used; the others must agree with it.
READERS: tuple[Callable[[Mapping[str, str]], Claim | None], ...] = (
    *(read_tfdp, read_tf_config, read_slurm, read_kubernetes),
    *(read_open_mpi, read_mpich, read_torchrun),
)
MPI_SOURCES = ("Open MPI", "MPICH")
DEVICES = "TFDP_DEVICES_PER_WORKER"


def find_cluster(environment: Mapping[str, str] | None = None) -> Cluster | None:
    """The cluster that the environment names, or None.

    Looked for in this order: `tfdp launch` (TFDP_WORKERS, TFDP_RANK,
    TFDP_COORDINATOR), TF_CONFIG, Slurm, Kubernetes, Open MPI, MPICH, torchrun.
    TFDP_COORDINATOR and TFDP_WORKERS also complete other launchers; TFDP_JOB_KEY is
    the job's key under any. One-process launchers around another one, as a Slurm
    allocation with one task (or one per node) around `mpiexec`, do not contradict it.
    TFDP_WORKERS=1 forces one worker. An unresolvable Slurm node gets Slurm's address.

    Args:
      environment: variables by name; None takes those of this process. With a mapping
        no names are resolved.

    Raises:
      ClusterError: a variable makes no sense, two launchers contradict each other, or
        a part is missing; the message quotes the variables.

    >>> cluster = find_cluster({"RANK": "1", "WORLD_SIZE": "2",
    ...                         "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    >>> cluster.rank, cluster.workers, cluster.coordinator, cluster.source
    (1, 2, 'node1:29500', 'torchrun')
    """
    is_own = environment is None
    environment = os.environ if environment is None else environment
    given = environment if isinstance(environment, Mapping) else {"It": environment}
    wrong = [name for name, value in given.items() if not isinstance(value, str)]
    if wrong:
        raise ClusterError(
            "find_cluster takes None (the environment), or a dict of texts, such as "
            f"{{'TFDP_WORKERS': '2'}}. {wrong[0]} is {type(given[wrong[0]]).__name__}."
        )
    devices = integer(present(environment, DEVICES), DEVICES, least=1)
    claims = [claim for read in READERS if (claim := read(environment)) is not None]
    claims = _without_surroundings(claims)
    if not claims:
        return None
    for claim, other in itertools.combinations(claims, 2):
        if claim.contradicts(other):
            raise ClusterError(
                f"{claim.source} and {other.source} contradict each other: "
                f"{claim.variables}, but {other.variables}. Start the program "
                "with one of them, and unset the variables of the other."
            )
    cluster = _combine(claims, devices, find_job_key(environment))
    if is_own and cluster.source == "Slurm" and "TFDP_COORDINATOR" not in environment:
        return with_slurm_address(cluster)
    return cluster


def _without_surroundings(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, less those of launchers that merely wrap another one."""
    alone = [claim for claim in claims if claim.workers == 1]
    if any(claim.source == "tfdp" for claim in alone):
        return [claim for claim in alone if claim.source == "tfdp"]
    inner = [claim for claim in claims if claim.workers != 1]
    if any(claim.source == "tfdp" and claim.rank is not None for claim in inner):
        # `tfdp launch` in pod 0: possibly the job's only pod; no variable says.
        inner = [c for c in inner if (c.workers, c.rank) != (None, 0)]
    if not any(claim.rank is not None for claim in inner):
        # Only the single process states a rank, so include its claim.
        inner = list(claims)
    mpi = next((claim for claim in inner if claim.source in MPI_SOURCES), None)
    if mpi is None:
        return inner
    # mpiexec starts a daemon per node with srun, and its processes inherit that step's
    # variables.
    return [c for c in inner if not (c.one_task_per_node and c.contradicts(mpi))]


def _combine(
    claims: Sequence[Claim], devices: int | None, job_key: str | None
) -> Cluster:
    chosen = next((claim for claim in claims if claim.rank is not None), claims[0])
    # The user sets TFDP_COORDINATOR, so it takes precedence.
    by_preference = [*(c for c in claims if c.source == "tfdp"), chosen, *claims]
    workers = next((c.workers for c in by_preference if c.workers is not None), None)
    coordinator = next((c.coordinator for c in by_preference if c.coordinator), None)
    lacks_coordinator = coordinator is None and chosen.needs_coordinator
    found = "; ".join(f"{claim.variables} ({claim.source})" for claim in claims)
    if chosen.rank is None or workers is None or (lacks_coordinator and workers > 1):
        raise ClusterError(
            f"The environment names a cluster, but not all of it. Found: {found}. "
            f"Missing: {', '.join(chosen.missing)}."
        )
    try:
        return Cluster(
            workers=workers,
            rank=chosen.rank,
            coordinator=coordinator,
            source=chosen.source,
            devices_per_worker=devices,
            job_key=job_key,
            job=chosen.job,
        )
    except ClusterError as error:
        raise ClusterError(f"{error} Found in the environment: {found}.") from None
