"""`Delayed` and `BoundedStaleness`: updates by the gradients of earlier steps."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdp.sync.policy import Policy, check_whole

#: Each host keeps `steps` + 1 copies of all gradients in its memory.
MOST_STEPS = 64


class LateSums(Policy):
    """Sums of gradients over hosts that travel while the next steps compute.

    steps           the most steps between a gradient and its update, 0 to MOST_STEPS
    takes_early     whether a host also takes a sum that is complete before it is due
    updates_a_step  the most updates in one step
    """

    steps: int
    needs_all_hosts: ClassVar[bool] = True
    takes_early: ClassVar[bool]
    updates_a_step: ClassVar[int]

    def __post_init__(self) -> None:
        why = ", as a host keeps the sums of so many steps in its memory"
        check_whole(self, "steps", 0, MOST_STEPS, why)

    @property
    def is_plain(self) -> bool:
        return self.steps == 0


@dataclasses.dataclass(frozen=True)
class Delayed(LateSums):
    """The sum of a step's gradients travels while the next `steps` steps compute.

    With d = `steps`, step t computes the gradient g_t of its global batch at the
    weights w_t, begins its sum over the hosts, and then makes the update of step t - d:

        w_(t+1) = w_t - opt(g_(t-d)(w_(t-d)))

    The first d steps make no update. The end of an epoch (and of `fit`) makes the d
    updates that are left, so that each gradient is used once. All hosts have the same
    weights in every step. Clipping, momentum, decay and averages act on the sum when
    it arrives. A learning rate that the program sets counts for the gradients of the
    steps that follow, as in plain training. An overflow with `dynamic_loss_scale` is
    found d steps late: up to d + 1 updates are skipped, and each halves the scale.

    Args:
      steps: d, the delay in updates, from 0 to 64. 0 is training without `sync`.

    Raises:
      ConfigurationError: when `steps` is out of its range.

    Cost: the bytes of plain training, in float32 and dense, embeddings included; d + 1
    copies of the gradients in host memory. A step takes the longer of its computation
    and its exchange, instead of their sum; hosts run at most d steps apart.

    Effect: the largest stable learning rate falls. For plain SGD and curvature a it is
    2 sin(pi / (4 d + 2)) / a: half of that of plain training (2 / a) for d = 1, 0.31
    for d = 2. A delay acts as additional momentum: with d = 1, lower a momentum
    of 0.9, or the learning rate, if the loss oscillates.

    >>> Delayed().steps
    1

    Sources: Zinkevich, Langford, Smola 2009, "Slow learners are fast" (delayed
    stochastic gradient descent). Mitliagkas, Zhang, Hadjis, Re 2016, "Asynchrony
    begets momentum". The bound follows from the roots of z^(d+1) - z^d + lr a.
    """

    steps: int = 1
    takes_early: ClassVar[bool] = False
    updates_a_step: ClassVar[int] = 1


@dataclasses.dataclass(frozen=True)
class BoundedStaleness(LateSums):
    """Hosts run at their own pace, at most `steps` steps apart.

    All hosts make the same updates in the same order: update k is by the sum of the
    gradients of step k over all hosts, each at the weights that its host had. With
    s = `steps`, a host that has ended step c makes the updates whose sums are complete,
    at most two, and waits until that of step c - s is made. So

        a host is at most s steps ahead of the slowest host
        step c reads weights that include all updates up to step c - s - 1

    A host checks both in every step. The end of an epoch, `evaluate`, `predict` and a
    checkpoint make the updates that are left: there all hosts have the same weights.

    Args:
      steps: s, from 0 to 64. 0 is training without `sync`.

    Raises:
      ConfigurationError: when `steps` is out of its range.

    Cost: that of `Delayed(s)`, with two updates in the graph of a step. A short pause
    of one host, of up to s steps, costs the others nothing; a host that is always slow
    still sets the pace.

    An update has the learning rate that the first host had in the step of its gradient:
    a program may set it in any step.

    Effect: results depend on timing; see `Delayed` for learning rate and momentum.

    >>> BoundedStaleness(2).steps
    2

    Source: Ho et al. 2013, "More effective distributed ML via a stale synchronous
    parallel parameter server", section 3 (the conditions above).

    Differs from the paper: there is no server, and a host's own gradients reach its
    weights together with those of the others.
    """

    steps: int
    takes_early: ClassVar[bool] = True
    updates_a_step: ClassVar[int] = 2
