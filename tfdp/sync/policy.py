"""`Policy`: how the hosts of one training synchronize, the base of all values here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from tfdp import checks
from tfdp.errors import ConfigurationError


class Policy:
    """Base of the values that `DistributedOptimizer(sync=...)` takes.

    across          which groups of replicas step together: those of one host
                    ("hosts"), or each one by itself ("replicas")
    weighs_batches  whether an update needs the weight of a group's batch
    trains_locally  whether steps read and update weights of the group
    keeps_local_values  whether checkpoints hold these, too
    has_own_pace    whether hosts may make different numbers of steps
    needs_all_hosts  whether it cannot go on without each of the hosts
    is_plain        whether this equals training without `sync`
    """

    across: str = "hosts"
    trains_locally: ClassVar[bool] = True
    keeps_local_values: ClassVar[bool] = True
    has_own_pace: ClassVar[bool] = False
    needs_all_hosts: ClassVar[bool] = False

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def weighs_batches(self) -> bool:
        return True

    def get_config(self) -> dict[str, Any]:
        """The fields and the name of the class, ready for JSON."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }
        if values.get("compression") is not None:
            values["compression"] = values["compression"].get_config()
        return {"method": type(self).__name__, **values}


def check_whole(
    policy: Policy, name: str, least: int, most: float = math.inf, why: str = ""
) -> None:
    """Requires an integer from `least` to `most`."""
    named = f"{type(policy).__name__}.{name}"
    checks.check_whole(named, getattr(policy, name), least, most, why)


def check_fraction(policy: Policy, name: str, *, below_one: bool) -> None:
    """Requires a finite number of at least 0, with `below_one` below 1."""
    value = getattr(policy, name)
    most = 1.0 if below_one else float("inf")
    if not checks.is_number(value) or not 0.0 <= value < most:
        rule = "from 0 to below 1" if below_one else "of at least 0, and finite"
        raise ConfigurationError(
            f"{type(policy).__name__}.{name} must be a number {rule}. "
            f"Received: {value!r}."
        )
    object.__setattr__(policy, name, float(value))  # JSON has no NumPy numbers
