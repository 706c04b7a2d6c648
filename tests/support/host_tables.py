"""Trains models with tables in parts on several hosts, and on one device.

python -m tests.support.host_tables FORM...

Prints, for each form and size of batch, how far weights, losses and evaluation are
from those of one device.
"""

import sys

import numpy as np

import tfdp
from tests.devices import test_tables_in_parts as tables


def main(forms):
    for form in forms:
        build = tables.FORMS.get(form, tables.classifier)
        optimizer = tables.OPTIMIZERS.get(form, tables.adam)
        for batch in (9, 1):
            strategy = tfdp.MultiHostDataParallelStrategy(
                shard="parameters", shard_min_bytes=0
            )
            own = tables.fitted(strategy, build, optimizer, batch)
            weights, rests = own[0].get_weights(), tables.rests_by_rows(own[0])
            one = tables.fitted(None, build, optimizer, batch)
            assert rests
            pairs = zip(weights, one[0].get_weights(), strict=True)
            far = max(float(np.abs(a - b).max()) for a, b in pairs)
            losses = float(np.abs(np.subtract(own[1], one[1])).max())
            print("far", form, batch, far, losses, abs(own[3] - one[3]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
