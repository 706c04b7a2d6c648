"""How long a training step takes on hardware that need not be here, and why.

`step.predict_step` predicts one number of devices, `scaling.scaling_curve` many. Sums
that overlap backward are simulated event by event, everything else is a formula.
"""
