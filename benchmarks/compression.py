"""Times the arithmetic of each compression method, and says on which links it pays.

One core encodes what it sends, decodes what two peers have sent, adds it up and finds
what is left: all that a host does in a step but for the sending, which is left out (the
other peer sends the same). On a link of w bytes per second n bytes of gradients then
take n / w as they are, and m / w + t compressed to m bytes in t seconds, so a method
pays below w = (n - m) / t.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.shared import least_to_most, make_parser, run_script, write_report
from tfdp.compression import FP8, Cast, Int4, Int8, PowerSGD, RandomK, SignSGD, TopK
from tfdp.compression.method import Method
from tfdp.tools.measuring.gradient_sets import GRADIENT_SETS
from tfdp.tools.measuring.one_core import take_one_thread, time_coding

METHODS: dict[str, Method] = {
    "Cast('bfloat16')": Cast("bfloat16"),
    "Int8()": Int8(),
    "Int4()": Int4(),
    "FP8('e4m3')": FP8("e4m3"),
    "SignSGD()": SignSGD(),
    "TopK(0.01)": TopK(0.01),
    "RandomK(0.01)": RandomK(0.01),
    "PowerSGD(1)": PowerSGD(1, start_step=0),
    "PowerSGD(4)": PowerSGD(4, start_step=0),
}


def run(options: argparse.Namespace) -> int:
    """Prints a line for each method."""
    take_one_thread()
    subject = "tiny" if options.quick else "resnet50"
    found = time_coding(METHODS, GRADIENT_SETS[subject](), options.repeats)
    print(
        f"Gradients of {subject}, two peers, one core; {options.repeats} repeats in "
        f"turn, median (least to most)\n{'method':18s} {'GB/s':>22s} "
        f"{'of the bytes':>13s} {'pays below Gbit/s':>18s}"
    )
    for name, (dense, sent, seconds) in found.items():
        rates = [dense / each / 1e9 for each in seconds]
        pays_below_gbit = 8 * (dense - sent) / statistics.median(seconds) / 1e9
        print(
            f"{name:18s} {least_to_most(rates, '.2f'):>22s} "
            f"{f'1/{dense / sent:.1f}':>13s} {pays_below_gbit:18.1f}"
        )
    rows = {
        name: {"dense_bytes": dense, "sent_bytes": sent, "seconds": seconds}
        for name, (dense, sent, seconds) in found.items()
    }
    write_report(options.json, "compression", rows=rows)
    return 0


if __name__ == "__main__":
    run_script(make_parser(__doc__, repeats=20), run)
