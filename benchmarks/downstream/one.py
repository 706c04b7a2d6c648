"""Runs the programs of one library, and prints an outcome for each, as JSON lines.

`python -m benchmarks.downstream.one keras_hub` works in an environment that has the
library, tfdp and this folder's repository on its path.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys


def main(library: str, names: list[str]) -> None:
    """Judges every program, or those that are named."""
    import tfdp

    tfdp.quiet()
    logging.getLogger("tfdp").setLevel(logging.ERROR)
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    from benchmarks.downstream.cases import judge

    cases = importlib.import_module(f"benchmarks.downstream.programs.{library}").CASES
    for name, case in cases.items():
        if not names or name in names:
            print(json.dumps(dataclasses.asdict(judge(name, case))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
