"""Looks at one part, in a process of its own: `python -m` this module."""

from __future__ import annotations

import sys
from typing import Any

from tfdp.errors import TfdpError
from tfdp.tools.bench.worker_process import answer, set_up_devices
from tfdp.tools.selftest.parts import Part

RIGHT, WRONG = "right", "WRONG"


def look_at(part: Part, device_type: str, count: int) -> dict[str, str]:
    """What was found, as plain data: the state, and what there is to say of it."""
    if part.one_replica:
        devices = set_up_devices(device_type, 1)
    else:
        devices = set_up_devices(device_type, count, may_split=True)
    import keras

    import tfdp

    keras.config.set_dtype_policy(part.policy)

    given = dict(part.communication)
    if isinstance(given.get("hierarchy"), list):
        given["hierarchy"] = tuple(given["hierarchy"])
    communication = tfdp.Communication(**given)
    strategy = tfdp.DataParallelStrategy(
        devices, communication=communication, alone=True, **part.strategy
    )
    try:
        return {"state": RIGHT, "said": _look(part, strategy)}
    except TfdpError as error:
        return {"state": WRONG, "said": f"{type(error).__name__}: {error}"}


def _look(part: Part, strategy: Any) -> str:
    if part.kind == "sums":
        from tfdp.tools.selftest.training import check_sums

        return check_sums(strategy)
    if part.kind == "training":
        from tfdp.tools.selftest.training import check_training

        return check_training(strategy, part.jit_compile)
    if part.kind == "memory":
        from tfdp.tools.selftest.memory import measure_memory

        return measure_memory(strategy)
    if part.kind == "overhead":
        from tfdp.tools.selftest.overhead import measure_overhead

        return measure_overhead(strategy)
    from tfdp.tools.selftest.rates import measure_rates

    return measure_rates(strategy)


def main(arguments: list[str]) -> None:
    """Entry point of the worker process."""

    def find(asked: dict[str, Any]) -> dict[str, str]:
        return look_at(Part(**asked["part"]), asked["device_type"], asked["devices"])

    answer(arguments, find)


if __name__ == "__main__":
    main(sys.argv[1:])
