"""How far two trainings may differ if only rounding differs.

N replicas sum in another order than one device: each over its own rows, then over
replicas. The effect is measured and bounded.

Measured: the one-device training is repeated ("twins") with permuted rows, which
reorders sums over the batch, and with inputs and initial weights each perturbed by one
rounding. The perturbation represents all other sums: a computed sum is the exact sum of
terms perturbed by rounding (Higham 2002, section 4.2), a computed product Wx the exact
product of a perturbed W (section 3.5), and kernels block small batches differently. The
twins contain whatever amplifies rounding (Adam with gradients near zero, cancellation).

Bounded: a sum of n terms in any order is off by about sqrt(n) u times their size
(Higham and Mary 2019, section 3; the certain bound, Higham 2002 eq. 4.4, has n instead
of sqrt(n)), and adding an update to a weight w rounds by u |w|; twice, for both
trainings:

    bound = SAFETY * spread + 2 t u |w| + 2 sqrt(n) u travel

after t steps with n rows, where `spread` is the largest difference between the
movements of the twins and of the one-device training, `|w|` the variable's largest
value and `travel` the sum over steps of its largest change.
"""

from __future__ import annotations

import math

import numpy as np

# A twin differs by one rounding per weight, but a dot product of k terms has k: sqrt(k)
# is 8 for k = 64.
SAFETY = 8.0


def bound(
    *,
    spread: float,
    step: int,
    largest_weight: float,
    travel: float,
    rows: int,
    variable_round_off: float,
    compute_round_off: float,
) -> float:
    """The effect of rounding on a variable's difference; see the module.

    `rows` are of the largest global batch; the units u are of the variable's dtype and
    of the coarsest one that the model computes in.
    """
    stored = 2 * step * variable_round_off * largest_weight
    summed = 2 * math.sqrt(rows) * compute_round_off * travel
    return SAFETY * spread + stored + summed


def largest(values: np.ndarray) -> float:
    """The largest magnitude; infinite if a value is not finite."""
    if values.size == 0:
        return 0.0
    found = float(np.max(np.abs(values.astype(np.float64))))
    return found if math.isfinite(found) else math.inf


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b, in float64."""
    # `largest` detects infinite weights.
    with np.errstate(invalid="ignore"):
        return a.astype(np.float64) - b.astype(np.float64)


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest magnitude of a - b; infinite if a value is not finite."""
    return largest(difference(a, b))


def excess(difference: float, bound: float) -> float:
    """Difference over bound; above 1 exceeds it; infinite without a bound."""
    if difference == 0 and math.isfinite(bound):
        return 0.0
    return difference / bound if 0 < bound < math.inf else math.inf


def nudge(
    values: np.ndarray, unit: float, generator: np.random.Generator
) -> np.ndarray:
    """Moves each value up or down by one rounding: w (1 +- 2 unit)."""
    signs = generator.choice(np.array([-1.0, 1.0]), size=values.shape)
    moved = values.astype(np.float64) * (1 + 2 * unit * signs)
    return moved.astype(values.dtype)
