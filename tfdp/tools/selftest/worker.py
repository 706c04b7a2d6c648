"""Runs one part of a self-test in its own process: `python -m` this module."""

from __future__ import annotations

import sys
from typing import Any

from tfdp.errors import TfdpError
from tfdp.tools.processes.children import answer
from tfdp.tools.processes.devices import set_up_devices
from tfdp.tools.selftest.parts import Part

RIGHT, WRONG = "right", "WRONG"


def run_part(part: Part, device_type: str, count: int) -> dict[str, str]:
    """The state of a part and its message, as plain data."""
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
        return {"state": RIGHT, "said": _run(part, strategy)}
    except TfdpError as error:
        return {"state": WRONG, "said": f"{type(error).__name__}: {error}"}


def _run(part: Part, strategy: Any) -> str:
    from tfdp.tools.selftest import memory, overhead, rates, training

    if part.kind == "sums":
        return training.check_sums(strategy)
    if part.kind == "training":
        return training.check_training(strategy, part.jit_compile)
    if part.kind == "memory":
        return memory.measure_memory(strategy)
    if part.kind == "overhead":
        return overhead.measure_overhead(strategy)
    return rates.measure_rates(strategy)


def _find(request: dict[str, Any]) -> dict[str, str]:
    return run_part(Part(**request["part"]), request["device_type"], request["devices"])


if __name__ == "__main__":
    answer(sys.argv[1:], _find)
