"""From a comparison that does not hold to its causes."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdp.step.find_optimizers import optimizers_of
from tfdp.tools.testing.batches import row_count
from tfdp.tools.testing.causes import (
    COMBINATIONS,
    FROM_FACTS,
    NOTHING_TO_TELL,
    SEPARABLE,
    UNKNOWN,
    Cause,
)
from tfdp.tools.testing.changes import (
    apply_changes,
    is_local_batch_norm,
    is_synchronized_by_keras,
)
from tfdp.tools.testing.comparison import Comparison, Setting, compare
from tfdp.tools.testing.crashes import explain_error
from tfdp.tools.testing.facts import Facts
from tfdp.tools.testing.model_parts import HALF_PRECISION, inner_optimizers, layers_of
from tfdp.tools.testing.report import Finding, be_conclusive


def diagnose(setting: Setting, comparison: Comparison) -> tuple[Finding, ...]:
    """The causes of a comparison that does not hold, each with what showed it.

    Facts come first. Then the changes of all separable causes that may apply are made
    together; if the comparison then holds, each that cannot be left out is a cause. If
    it does not, the other causes are tried on top, one after the other.

    Cost: one comparison per change that is tried, a handful.
    """
    if comparison.error is not None:
        return (explain_error(comparison.error),)
    facts = read_facts(setting, comparison)
    certain = [cause for cause in FROM_FACTS if cause.where(facts) is not None]
    if certain:
        return _findings(certain[:1], facts)
    separable = [cause for cause in SEPARABLE if cause.where(facts) is not None]
    for combination in ((), *COMBINATIONS):
        causes = [*separable, *combination]
        if not causes or any(cause.where(facts) is None for cause in combination):
            continue
        if _holds(setting, causes):
            needed = [c for c in separable if not _holds_without(setting, causes, c)]
            found = [*needed, *combination]
            return _findings(found or separable, facts)
    return _findings([UNKNOWN if facts.moved_enough else NOTHING_TO_TELL], facts)


def _holds(setting: Setting, causes: Sequence[Cause]) -> bool:
    names = [cause.change for cause in causes if cause.change is not None]
    changed = apply_changes(setting, names)
    if changed is None:
        return False
    try:
        return compare(changed).ok
    except Exception:
        # A change may not suit the model, which then shows nothing.
        return False


def _holds_without(setting: Setting, causes: Sequence[Cause], omitted: Cause) -> bool:
    others = [cause for cause in causes if cause is not omitted]
    # Without any change it is the comparison that failed.
    return bool(others) and _holds(setting, others)


def _findings(causes: Sequence[Cause], facts: Facts) -> tuple[Finding, ...]:
    words = vars(facts)
    return tuple(
        Finding(
            cause=cause.name,
            where=cause.where(facts) or (),
            evidence=cause.evidence.format(**words),
            why=cause.why.format(**words),
            instead=cause.instead.format(**words),
        )
        for cause in causes
    )


def read_facts(setting: Setting, comparison: Comparison) -> Facts:
    """What the table of causes looks at."""
    model, replicas = comparison.model, setting.strategy.num_replicas_in_sync
    layers = layers_of(model)
    return Facts(
        replicas=replicas,
        batch_rows=tuple(row_count(batch) for batch in setting.batches),
        optimizer=type(inner_optimizers(model.optimizer)[-1]).__name__,
        clipping=_clipping(model),
        local_batch_norms=tuple(
            layer.name for layer in layers if is_local_batch_norm(layer, replicas)
        ),
        synchronized_batch_norms=tuple(
            layer.name for layer in layers if is_synchronized_by_keras(layer)
        ),
        masking_layers=tuple(
            layer.name
            for layer in layers
            if isinstance(layer, keras.layers.Masking)
            or getattr(layer, "mask_zero", False)
        ),
        drawing_layers=comparison.drawing_layers,
        train_step=_own_train_step(model),
        loss_functions=_loss_functions(model.loss),
        sample_weights=any(_has_sample_weight(batch) for batch in setting.batches),
        half_precision=any(layer.compute_dtype in HALF_PRECISION for layer in layers),
        finite_on_one_device=comparison.finite_on_one_device,
        finite_on_replicas=comparison.finite_on_replicas,
        # Where a bound is exceeded there is something to tell by.
        moved_enough=be_conclusive(comparison.rows)
        or any(row.first_step_over is not None for row in comparison.rows),
    )


def _clipping(model: keras.Model) -> tuple[str, ...]:
    found = {
        f"{name}={getattr(optimizer, name)}": None
        for outer in optimizers_of(model)
        for optimizer in inner_optimizers(outer)
        for name in ("clipnorm", "global_clipnorm", "clipvalue")
        if getattr(optimizer, name, None) is not None
    }
    return tuple(found)


def _own_train_step(model: keras.Model) -> str | None:
    if type(model).train_step is keras.Model.train_step:
        return None
    return type(model).__name__


def _loss_functions(loss: object) -> tuple[str, ...]:
    if isinstance(loss, dict):
        parts = list(loss.values())
    elif isinstance(loss, (list, tuple)):
        parts = list(loss)
    else:
        parts = [loss]
    return tuple(
        getattr(part, "__name__", type(part).__name__)
        for part in parts
        if callable(part) and not isinstance(part, keras.losses.Loss)
    )


def _has_sample_weight(batch: object) -> bool:
    return isinstance(batch, tuple) and len(batch) > 2
