"""`Asynchronous`: each host pulls weights and pushes gradients at its own pace."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdp.sync.policy import Policy


@dataclasses.dataclass(frozen=True)
class Asynchronous(Policy):
    """Each host trains at its own pace; owners of the weights update them.

    Each of H hosts owns one part of H of every weight, and of the optimizer's state.
    In a step a host computes the gradient g of its own batch at the weights w_v that it
    has, pushes each owner its part of g, and gets the newest part back. An owner makes
    one update by each push, in the order in which pushes arrive:

        w <- w - opt(g(w_v)),   with the rate   a / max(1, s)

    where a is the learning rate of the host that pushes, now, and the staleness s is
    the number of updates that the owner made since w_v. No step waits for another host.

    At the end of an epoch, and at `evaluate`, `predict` and a `tfdp` checkpoint within
    one, all hosts wait until every push is applied, and take the same weights: equal
    bit for bit. Between these places a model's variables (`get_weights`, files of
    Keras') hold the weights of the last one. A host whose steps have ended serves the
    others until then. `DistributedOptimizer.staleness_counts` is the histogram of s.

    Raises:
      ConfigurationError: where training begins, with the reason, for what cannot work:
        one host, another engine than "sockets", an optimizer that does not update each
        element by itself (Lamb, Muon), `shard=`, `accumulate_steps`, loss scaling.

    Cost: for n bytes of weights, n (H - 1) / H bytes to other hosts in a step, of an
    embedding the touched rows only, and as many back, tables included; in host memory
    the owned part of weights and state beside the model's own. A step waits for its
    replies: a host that stands still, rather than being slow, stops all.

    Effect: results depend on timing. H hosts of equal speed have a staleness near
    H - 1. `iterations` counts the pushes of all hosts, so a schedule needs H times the
    steps; weight decay acts once per push.

    >>> Asynchronous().get_config()
    {'method': 'Asynchronous'}

    Sources: Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD,
    owners of parameters). Zhang, Gupta, Lian, Liu 2015, "Staleness-aware async-SGD for
    distributed deep learning" (arXiv 1511.05950; the rate).

    Differs from the papers: hosts that train own the parameters, and there are no other
    servers. Each push makes an update, and has a staleness of its own at each owner.
    """

    @property
    def weighs_batches(self) -> bool:
        return False

    #: A checkpoint holds the weights on which all hosts agree, and no others.
    keeps_local_values: ClassVar[bool] = False
    #: Hosts may make different numbers of steps in an epoch.
    has_own_pace: ClassVar[bool] = True
    needs_all_hosts: ClassVar[bool] = True
