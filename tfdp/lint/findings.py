"""Sentences about what the analysis found, each with its cure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tfdp.lint.values import (
    CHOSEN,
    JOINED,
    LOCAL_TERMS,
    NORMALIZED,
    NOT_LINEAR,
    PAIRED,
    QUOTIENT,
    Crossing,
    Term,
    Value,
)

#: Ends the sentence of a line that scales a loss: its scaled value is 1/n of a mean.
FOR_METRICS = "keep the unscaled loss for metrics, such as perplexity"
_BY_HAND = (
    "compute it from tfdp.losses.all_rows(x), take the gradient of "
    f"tfdp.losses.local_mean(loss), and {FOR_METRICS}"
)
#: What to write where rows see each other, by the place: one that `on_all_rows`
#: reaches, a step that calls no `compute_loss`, and a layer.
IN_LOSS = (
    "Call tfdp.losses.on_all_rows(model) after compile (for a layer "
    f"tfdp.layers.AllRows(layer)); or {_BY_HAND}"
)
IN_STEP = f"In the step, {_BY_HAND}; or put a layer into tfdp.layers.AllRows(layer)"
IN_LAYER = (
    "Put {} into tfdp.layers.AllRows(layer); or compute it there from "
    "tfdp.losses.all_rows(x)"
)
IN_ANY_LAYER = IN_LAYER.format("what does it, a layer or a part of call(),")
_CROSSINGS = {
    PAIRED: (
        "rows are paired with all rows of their batch (in {op!r}), as in contrastive "
        "losses, and a replica has only its own: each is paired with fewer others "
        "than on one device. {cure}"
    ),
    JOINED: (
        "rows are joined with other rows of their batch (in {op!r}), and a replica has "
        "its own rows only. {cure}"
    ),
    CHOSEN: (
        "rows are chosen, sorted or numbered by a look at all rows of the batch (in "
        "{op!r}), and a replica has its own rows only. {cure}"
    ),
    QUOTIENT: (
        "a sum over rows is divided by another one (in {op!r}), as in a mean over the "
        "tokens that a mask keeps, and each replica divides by that of its own rows. "
        "{cure}"
    ),
    NORMALIZED: (
        "a number of all rows of the batch (in {op!r}), such as their mean, a softmax "
        "over them or a count of positives, enters the loss of each, and a replica "
        "computes it from its own rows only. {cure}; or sum it first, "
        "tfdp.losses.all_sum(number)"
    ),
    NOT_LINEAR: (
        "a root, product, quotient or maximum is taken of a mean or a sum over rows "
        "(in {op!r}), and the replicas' results cannot be combined to that of all "
        "rows. {cure}"
    ),
}
_MASKED_MEAN = (
    "Write loss = tfdp.losses.local_sum(tf.reduce_sum(losses * mask) / "
    "tfdp.losses.all_sum(tf.reduce_sum(mask))), and metrics, such as perplexity, "
    "from tfdp.losses.all_sum(loss); another quotient (Dice, F1) needs {}"
    "tfdp.losses.all_rows(x)"
)
#: JOINED or CHOSEN, where values of all rows enter: rows are numbered from 0 on each.
_GATHERED = (
    "values of tfdp.losses.all_rows are joined with labels or numbers of a replica's "
    "own rows (in {op!r}), which begin at 0 on each replica. Number the rows of all "
    "and take this replica's, labels = tfdp.losses.own_rows(tf.range(tf.shape("
    "tfdp.losses.all_rows(x))[0]), x)"
)
#: After "a loss", "a gradient" or a name of what is stored.
COUNTED = (
    "multiplied or divided by the number of rows of the batch, such as tf.shape(x)[0], "
    "and a replica counts its own rows, where one device counts all. Take "
    "tfdp.losses.local_mean(loss) of the loss, which scales it by the rows of all; or "
    "count these, tf.shape(tfdp.losses.all_rows(y))[0]"
)
LOST = (
    "tfdp could not follow the loss past {op} in {place!r}: whether replicas get one "
    "device's numbers is not known. `tfdp check` compares them"
)
NO_MEAN = (
    "which is not a mean over them, such as a root, a quotient of sums, a sum or a "
    "maximum: the mean of the replicas' numbers is reported, and one device reports "
    "another. Mend it so: {}; give a metric one number for each row, or keep sums in "
    "it and compute the rest in its result()"
)


class Findings:
    """Sentences, of each kind the first only: one fault has several symptoms."""

    def __init__(self) -> None:
        self._by_kind: dict[str, str] = {}

    def add(self, sentence: str, kind: str = "") -> None:
        self._by_kind.setdefault(kind or sentence, sentence)

    def has(self, kind: str) -> bool:
        return kind in self._by_kind

    def __getitem__(self, kind: str) -> str:
        return self._by_kind.get(kind, "")

    def drop(self, kind: str) -> None:
        self._by_kind.pop(kind, None)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._by_kind.values()))

    def __bool__(self) -> bool:
        return bool(self._by_kind)


class Cures(dict[Crossing, str]):
    """The lines to write where rows see each other; `other` at an unknown place."""

    other = IN_LOSS


def crossing_of(
    crossings: Iterable[Crossing], cures: Cures, *, with_gathered: bool = False
) -> str | None:
    """The sentence about rows that depend on each other; None: they do not.

    `with_gathered`: values of the rows of all replicas enter as well.
    """
    order = list(_CROSSINGS)
    ranked = sorted(crossings, key=lambda one: (order.index(one.kind), one.op))
    if not ranked:
        return None
    first = ranked[0]
    cure = cures.get(first, cures.other)
    mark = "tfdp.losses.on_all_rows(model) after compile" if cure is IN_LOSS else ""
    if with_gathered and first.kind in (JOINED, CHOSEN) and cure != IN_ANY_LAYER:
        other = f"; or leave both out and call {mark}" if mark else ""
        return _GATHERED.format(op=first.op) + other
    if first.kind == QUOTIENT and cure in (IN_LOSS, IN_STEP):
        cure = _MASKED_MEAN.format(mark and f"{mark}, or ")
    return _CROSSINGS[first.kind].format(op=first.op, cure=cure)


def no_mean(value: Value, cure: str) -> str:
    """The end of a sentence about a number of all rows that is no mean over them."""
    mark = "call tfdp.losses.on_all_rows(model), or " if cure is IN_LOSS else ""
    lines = [f"{mark}compute it from tfdp.losses.all_rows(y)"]
    is_sum = Term.SUM in value.terms and not value.cross
    lines.insert(not is_sum, "return tfdp.losses.local_sum(x) of a sum")
    return NO_MEAN.format("; ".join(lines))


def is_no_mean(value: Value) -> bool:
    """Whether a number depends on rows, and surely not as a mean over them."""
    if Term.UNKNOWN in value.terms:
        return False
    if value.is_scaled_by_count and value.terms & {Term.MEAN, Term.REPLICATED}:
        return True
    if value.terms & {Term.SUM, Term.OTHER} or value.terms == {Term.COUNT}:
        return True
    return Term.ROWS in value.terms or bool(value.cross and value.terms & LOCAL_TERMS)


def past_op(lost: Iterable[str]) -> str:
    """The sentence about the first op that the analysis does not know."""
    op, _, name = min(lost).partition(" ")
    return LOST.format(op=op, place=name.rpartition("/")[0] or name)


def change_of_gradients(gradient: Value, *, scales_by_hand: bool) -> str | None:
    """How a program changed a gradient before `apply`, if not linearly."""
    is_sum = gradient.of_all and not gradient.is_of_replica and gradient.target is None
    if is_sum and not scales_by_hand:
        return (
            "gradients that an optimizer got were summed over the replicas already "
            "(all_sum, all_reduce), and apply sums them again: each update is as many "
            "times too large as there are replicas. Give apply each replica's own "
            "gradients; a number computed from the sums, such as a norm, may scale them"
        )
    if gradient.target is None:
        return None
    extra = gradient.terms - gradient.target.terms
    if extra & {Term.MIXED, Term.OTHER}:
        return (
            "gradients were changed before apply by a function of their own values, "
            "such as clipping by a norm, and a replica has a part of their sum only. "
            "Let the optimizer do it, which gets the sum (clipnorm, global_clipnorm, "
            "clipvalue), or compute the factor, and nothing else, from "
            "tfdp.losses.all_sum(gradients)"
        )
    if extra & {Term.REPLICATED, Term.CONSTANT} and not scales_by_hand:
        return (
            "something that is no gradient, such as weight decay or noise, was added "
            "to gradients before apply. The replicas' gradients are summed, so it "
            "counts once for each replica. Let the optimizer do it (weight_decay), or "
            "divide it by strategy.num_replicas_in_sync in the step"
        )
    return None


def unscaled_part(loss: Value, *, scales_by_hand: bool) -> str | None:
    """Why the gradient of a number is not that of the whole batch; None: it is."""
    if scales_by_hand or loss.terms & {Term.UNKNOWN, Term.MIXED}:
        return None
    is_drawn = any(one.startswith("drawn") for one in loss.local)
    if Term.MEAN in loss.terms:
        return "it is a mean over the replica's rows"
    if loss.terms & {Term.OTHER, Term.ROWS}:
        return "it is a function of the replica's rows that is no sum over them"
    if Term.REPLICATED in loss.terms:
        if loss.of_all:
            return "it is computed from the rows of all replicas, on each of them"
        if is_drawn:
            return "it is a mean over values that each replica draws itself"
        return "a part of it, such as a penalty on weights, is the same on all replicas"
    return None
