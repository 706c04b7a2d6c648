"""What a worker and whoever starts it agree on: "saved, start me again"."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdp.cluster.claim import integer, present

__all__ = ["RESTARTS", "START_AGAIN", "restarts"]

#: Exit code of a worker that was asked to stop, has saved, and would go on from there.
#: EX_TEMPFAIL of BSD's sysexits.h: "the user is invited to retry". Python, shells and
#: signals (128 and above) use it for nothing else.
START_AGAIN = 75
RESTARTS = "TFDP_RESTARTS"


def restarts(environment: Mapping[str, str] | None = None) -> int:
    """How often `tfdp launch` has started this training again; 0 the first time.

    Args:
      environment: variables by name; None takes those of this process.

    Raises:
      ClusterError: when TFDP_RESTARTS is no integer of at least 0.

    >>> restarts({}), restarts({"TFDP_RESTARTS": "2"})
    (0, 2)
    """
    found = present(os.environ if environment is None else environment, RESTARTS)
    return integer(found, RESTARTS, least=0) or 0
