"""How fast a core of this machine makes gradients small, and reads them."""

from __future__ import annotations

import pathlib
import statistics
import tempfile

from tfdp.bench.python_process import ProcessFailed, run_python
from tfdp.errors import CollectiveError
from tfdp.files.checked_json import parse_json

__all__ = ["WAYS", "measure_coding"]

#: Name in `tfdp.simulator.lossy.KNOWN_WAYS` -> name in `tfdp bench compression`.
WAYS = {
    "bfloat16": "Cast('bfloat16')",
    "int8": "Int8()",
    "fp8": "FP8('e4m3')",
    "int4": "Int4()",
    "sign": "SignSGD()",
    "top_k": "TopK(0.01)",
    "random_k": "RandomK(0.01)",
    "power_sgd": "PowerSGD(1)",
}


def measure_coding(
    repeats: int, quick: bool, timeout_seconds: float
) -> dict[str, float]:
    """Bytes of gradients a second of one core, by the names of `KNOWN_WAYS`.

    `tfdp bench compression` in a process of its own, whose TensorFlow has one thread.

    Args:
      repeats: figures of each way; their medians count.
      quick: few and small gradients, which shows that it runs.
      timeout_seconds: the most that it may take.

    Raises:
      CollectiveError: it failed, or took too long; with its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="tfdp-measure-") as folder:
        path = pathlib.Path(folder, "coding.json")
        words = ["bench", "compression", "--repeats", str(repeats), "--json", str(path)]
        words += ["--quick"] * quick
        try:
            run_python(["-m", "tfdp", *words], timeout_seconds)
            figures = parse_json(path.read_text("utf-8"))
        except (ProcessFailed, OSError) as error:
            raise CollectiveError(
                f"`tfdp bench compression` failed:\n{error}"
            ) from None
    return {
        way: figures[name]["dense_bytes"] / statistics.median(figures[name]["seconds"])
        for way, name in WAYS.items()
        if name in figures
    }
