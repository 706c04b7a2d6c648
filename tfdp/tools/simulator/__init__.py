"""How long a training step takes on hardware that need not be here, and why.

`predict_step` in `step.py` says it for one number of devices, `scaling_curve` in
`scaling.py` for many. Sums that overlap backprop are played through event by event
(`overlap.py`), everything else is a formula.
"""
