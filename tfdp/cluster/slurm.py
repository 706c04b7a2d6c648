"""Slurm: the variables of a job step, and its compressed lists of hosts.

`srun` gives every task SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST. The
batch script itself, and a shell of `salloc`, have the variables of the whole job with
SLURM_PROCID=0 or none at all, but are one process: only a step names a cluster.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from tfdp.cluster.claim import Claim, integer, present, shortened
from tfdp.cluster.description import join_address
from tfdp.cluster.ports import FIRST_PORT, LAST_PORT
from tfdp.errors import ClusterError

__all__ = ["expand_hosts", "read_slurm", "slurm_port"]

_Names = tuple[str, ...]
TASKS: _Names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NODES: _Names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NODE_COUNTS: _Names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
JOB: _Names = ("SLURM_JOB_ID", "SLURM_JOBID")
STEP: _Names = ("SLURM_STEP_ID", "SLURM_STEPID")
# More than Slurm manages in one cluster (65,533): a list that names more is no list.
MOST_HOSTS = 100_000
MOST_BRACKETS = 8
MOST_DIGITS = 12


def read_slurm(environment: Mapping[str, str]) -> Claim | None:
    """The claim of a Slurm step; None outside one.

    A batch script of several nodes gets an incomplete claim, so that forgetting
    `srun` is an error and not a training on the first node alone.
    """
    found = present(environment, "SLURM_PROCID")
    for names in (TASKS, NODES, NODE_COUNTS, JOB, STEP):
        found |= dict(list(present(environment, *names).items())[:1])
    rank = integer(found, "SLURM_PROCID", least=0)
    workers = _first_integer(found, TASKS, least=1)
    nodes = _first_integer(found, NODE_COUNTS, least=1)
    # Process 0 of a job without a step is the batch script; others are in a step.
    if not rank and not present(environment, *STEP, NODES[0]):
        if nodes is None or nodes == 1:
            return None
        missing: _Names = (
            f"a job step: this is the batch script of {nodes} nodes. Start the program "
            "with `srun python ...`, or set TFDP_WORKERS=1 to use this node alone",
        )
        return Claim("Slurm", found, missing=missing)

    hosts = _first(found, NODES)
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
    """The coordinator's port, 20000..29999, the same on all hosts without asking.

    Derived from the job's id, so that jobs which share a node differ, and the
    step's, so that the steps of one job do. The ids of jobs that run at a time are
    close to each other; steps are put 101 apart.

    >>> slurm_port(200505), slurm_port(200505, step=1)
    (20505, 20606)
    """
    return FIRST_PORT + (job + 101 * step) % (LAST_PORT + 1 - FIRST_PORT)


def expand_hosts(text: str) -> list[str]:
    """The hosts of Slurm's compressed list, in its order.

    >>> expand_hosts("node[01-03,7],other")
    ['node01', 'node02', 'node03', 'node7', 'other']
    >>> expand_hosts("rack[1-2]n[0-1]-ib")
    ['rack1n0-ib', 'rack1n1-ib', 'rack2n0-ib', 'rack2n1-ib']

    Raises:
      ClusterError: when the text is not such a list, or names over 100,000 hosts.
    """
    # A comma separates hosts only outside of brackets.
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


# The width and the numbers of one part of what stands in brackets.
_Part = tuple[int, range]


def _parse_item(item: str, text: str) -> tuple[list[str], list[list[_Part]]]:
    """What stands around the brackets, and what each of them names."""
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
            # The width of the first number holds for all: 01-03, 098-102.
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
    return ClusterError(
        "Slurm's list of nodes must look like node[01-03,7],other. "
        f"Received: {shortened(text)!r}."
    )


def _first(found: Mapping[str, str], names: _Names) -> str | None:
    return next((found[name] for name in names if name in found), None)


def _first_integer(found: Mapping[str, str], names: _Names, least: int) -> int | None:
    return next((integer(found, name, least) for name in names if name in found), None)
