"""Finds the causes of a failed comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import keras

from tfdp.errors import LocalMeanWarning
from tfdp.step.find_optimizers import optimizers_of
from tfdp.tools.testing import causes as known
from tfdp.tools.testing import changes
from tfdp.tools.testing.batches import row_count
from tfdp.tools.testing.comparison import Comparison, compare
from tfdp.tools.testing.crashes import explain_error
from tfdp.tools.testing.facts import CauseFacts
from tfdp.tools.testing.model_parts import HALF_PRECISION, inner_optimizers, layers_of
from tfdp.tools.testing.report import Finding, are_conclusive
from tfdp.tools.testing.stages import begin_stage
from tfdp.tools.testing.trainee import CheckedTraining


def diagnose(setting: CheckedTraining, comparison: Comparison) -> tuple[Finding, ...]:
    """The causes of a failed comparison, each with its evidence.

    Facts come first. Then it makes the changes of all applicable separable causes at
    once; if the comparison then holds, every change that is needed for it is a cause.
    Otherwise a change of gradients is that the analysis of the step has found, or else
    it adds the changes of the other causes, in order.

    Cost: one comparison per change that is tried, a handful.
    """
    if comparison.error is not None:
        return (explain_error(comparison.error),)
    facts = read_facts(setting, comparison)
    certain = [c for c in known.FROM_FACTS if c.where(facts) is not None]
    if certain:
        return _findings(certain[:1], facts)
    separable = [c for c in known.SEPARABLE if c.where(facts) is not None]
    for combination in ((), *known.COMBINATIONS):
        if combination and facts.gradient_change:
            # With what the step does to gradients, others would hold by chance.
            return _findings([known.CHANGED_GRADIENTS], facts)
        causes = [*separable, *combination]
        if not causes or any(cause.where(facts) is None for cause in combination):
            continue
        if _holds(setting, causes):
            # Without changes it is the failed comparison itself.
            needed = [
                omitted
                for omitted in separable
                if len(causes) == 1
                or not _holds(setting, [c for c in causes if c is not omitted])
            ]
            found = [*needed, *combination]
            return _findings(found or separable, facts)
    if not facts.moved_enough:
        return _findings([known.TOO_LITTLE_MOVEMENT], facts)
    return _findings([known.TOLD if facts.told else known.UNKNOWN], facts)


def find_lost_sums(paths: tuple[str, ...]) -> tuple[Finding, ...]:
    """The cause of weights that move too little in half precision; () if none do."""
    cause = known.IN_HALF_PRECISION
    texts = cause.evidence, cause.why, cause.instead
    return (Finding(cause.name, paths, *texts),) if paths else ()


def _holds(setting: CheckedTraining, causes: Sequence[known.Cause]) -> bool:
    names = [cause.change for cause in causes if cause.change is not None]
    begin_stage(f"looks for the cause: {', '.join(cause.name for cause in causes)}")
    changed = changes.apply_changes(setting, names)
    try:
        # Experiments repeat what the first comparison has warned of.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LocalMeanWarning)
            return changed is not None and compare(changed).ok
    except Exception:
        # The change does not suit the model, and shows nothing.
        return False


def _findings(causes: Sequence[known.Cause], facts: CauseFacts) -> tuple[Finding, ...]:
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


def read_facts(setting: CheckedTraining, comparison: Comparison) -> CauseFacts:
    """The facts for the table of causes."""
    model, replicas = comparison.model, setting.replicas
    layers = layers_of(model)

    def names(is_one: Callable[[keras.layers.Layer], bool]) -> tuple[str, ...]:
        return tuple(layer.name for layer in layers if is_one(layer))

    counts = tuple(row_count(batch) for batch in setting.batches)
    told, _, told_instead = next(iter(comparison.told), "").partition(". ")
    least, most = min(counts) // replicas, max(counts) // replicas
    return CauseFacts(
        replicas=replicas,
        batch_rows=counts,
        rows_of_replica=f"{least}" if least == most else f"{least} to {most}",
        optimizer=type(inner_optimizers(model.optimizer)[-1]).__name__,
        clipping=_clipping(model),
        local_batch_norms=names(lambda x: changes.is_local_batch_norm(x, replicas)),
        synchronized_batch_norms=names(changes.is_synchronized_by_keras),
        masking_layers=names(_makes_mask),
        drawing_layers=comparison.drawing_layers,
        train_step=_custom_train_step(model),
        loss_functions=_loss_functions(model.loss),
        sample_weights=any(
            isinstance(b, tuple) and len(b) > 2 for b in setting.batches
        ),
        gradient_change=comparison.gradient_change[0],
        gradient_advice=comparison.gradient_change[1],
        half_precision=any(layer.compute_dtype in HALF_PRECISION for layer in layers),
        finite_on_one_device=comparison.finite_on_one_device,
        finite_on_replicas=comparison.finite_on_replicas,
        # A row that exceeds its bound is conclusive, too.
        moved_enough=are_conclusive(comparison.rows)
        or any(row.first_step_over is not None for row in comparison.rows),
        told=told,
        told_instead=told_instead,
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


def _makes_mask(layer: keras.layers.Layer) -> bool:
    is_masking = isinstance(layer, keras.layers.Masking)
    return is_masking or getattr(layer, "mask_zero", False)


def _custom_train_step(model: keras.Model) -> str | None:
    is_keras = type(model).train_step is keras.Model.train_step
    return None if is_keras else type(model).__name__


def _loss_functions(loss: object) -> tuple[str, ...]:
    if isinstance(loss, dict):
        loss = list(loss.values())
    return tuple(
        getattr(part, "__name__", type(part).__name__)
        for part in (loss if isinstance(loss, (list, tuple)) else [loss])
        if callable(part) and not isinstance(part, keras.losses.Loss)
    )
