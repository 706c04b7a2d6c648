"""`tfdp bench`: named cases, the stock strategy measured in the same run.

A case is a row of `cases.CASES`. The runner starts one worker process per case and
device count, because TensorFlow fixes its devices when it starts. The worker builds
the case's arms (strategies), runs them in turn, and hands back the seconds of every
repeat; medians, spreads and ratios are made from these.

    cases -> runner -> worker -> reduction | training -> interleave
                    <- results -> table, JSON
"""
