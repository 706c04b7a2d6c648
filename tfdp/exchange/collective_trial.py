"""A first, small sum by TensorFlow's collectives: do they work between these hosts?

A library that is missing, or a network that lets nothing through, shows in the first
collective only, and one that failed cannot be used again in its process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.engine import next_group_key
from tfdp.hosts.host_link import HostLink

__all__ = ["NO_ANSWER", "try_collectives"]

#: What a worker says that is not at fault itself, perhaps.
NO_ANSWER = "the other workers were not heard"

ELEMENTS = 256
#: How long a worker waits for the others here, who are all on their way.
TRIAL_SECONDS = 60.0


def try_collectives(
    link: HostLink,
    devices: Sequence[str],
    hint: str,
    trial_seconds: float = TRIAL_SECONDS,
) -> str:
    """Adds up what is known on all hosts.

    Args:
      link: tells which host this is; nothing crosses it.
      devices: of this host's replicas.
      hint: "nccl": over all replicas; "ring": over the first of each host.
      trial_seconds: until a worker that hears nothing gives up.

    Returns:
      What went wrong on this host, in a few words; "" when the sums were right.
    """
    members = list(devices) if hint == "nccl" else list(devices[:1])
    hosts = link.workers
    group_key, instance_key = next_group_key(), 1
    first = link.rank * len(members)
    tokens = [names.make_token(device) for device in members]

    @tf.function(autograph=False)
    def sums() -> list[tf.Tensor]:
        totals = []
        for place, device in enumerate(members):
            with tf.device(device):
                total = tf.raw_ops.CollectiveReduceV2(
                    input=tf.fill([ELEMENTS], float(first + place + 1)),
                    merge_op="Add",
                    final_op="Id",
                    group_size=hosts * len(members),
                    group_key=group_key,
                    instance_key=instance_key,
                    ordering_token=[tokens[place].handle],
                    communication_hint=hint,
                    timeout_seconds=trial_seconds,
                )
            # Or one replica's would wait for the next one's.
            names.run_independently(total.op)
            totals.append(total)
        return totals

    count = hosts * len(members)
    expected = count * (count + 1) / 2
    try:
        found = [total.numpy() for total in sums()]
    except tf.errors.DeadlineExceededError:
        return NO_ANSWER
    except tf.errors.OpError as error:
        return f"{type(error).__name__}: {_first_line(error.message)}"
    if all(np.array_equal(total, np.full(ELEMENTS, expected)) for total in found):
        return ""
    return f"a sum over {count} replicas was {found[0][0]:g} in the place of {expected}"


def _first_line(message: str) -> str:
    """Of TensorFlow's message, behind its headings."""
    lines = [line.strip() for line in message.splitlines()]
    headings = ("Graph execution error", "Detected at node")
    told = [line for line in lines if line and not line.startswith(headings)]
    return told[0] if told else message.strip()
