"""The abstract value of a tensor: how it depends on a replica's rows and losses.

A value is a sum of terms, each of one kind (`Term`). Operations map values to values:
sums join terms, products and other functions look at the terms of both operands. With
x_i a row of this replica and n their number, `g` any function of one row:

    ROWS    g(x_i), an entry for each row, along the axis `axes`
    MEAN    (1/n) sum_i g(x_i)          SUM    sum_i g(x_i)
    SHARE   c S, with S of this replica and c a factor that scales to the whole batch

all times n^`power`: a sum divided by n is a mean, a mean times n a sum; any other power
is left, and tells that a replica counted its own rows where one device counts all.

What is none of these depends on several rows at once, and `cross` says how.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class Term(enum.Enum):
    """The kind of a term of a value. `n` is the number of this replica's rows."""

    CONSTANT = "a constant other than 0"
    REPLICATED = "of variables, of other arguments, or of all replicas"
    COUNT = "of the number of this replica's rows only"
    ROWS = "of one row for each entry"
    MEAN = "the mean over this replica's rows"
    SUM = "the sum over this replica's rows"
    OTHER = "another function of this replica's rows"
    FACTOR = "a factor that scales a loss to its share"
    REPORT_FACTOR = "a factor that takes a share back for a report"
    SHARE = "a share of the loss of all replicas"
    REPORTED = "a share without its factor"
    MIXED = "no linear function of a share"
    SHARD = "this replica's part of a summed gradient that is stored in shards"
    SHARD_NUMBER = "a number of this replica's part"
    UNKNOWN = "not analysed"


class Crossing(NamedTuple):
    """How a value depends on several rows at once: the kind, and the op that did it."""

    kind: str
    op: str


#: Kinds of `Crossing`.
PAIRED = "paired"  # rows are paired with all rows of the batch
JOINED = "joined"  # rows are joined with other rows: shifted, reversed, shuffled
NORMALIZED = "normalized"  # a number of all rows enters each row, or divides a sum
QUOTIENT = "quotient"  # a sum over rows is divided by another one: a masked mean
CHOSEN = "chosen"  # rows are chosen or sorted by looking at all of them
NOT_LINEAR = "not linear"  # a root, product, quotient, maximum of means or sums

#: The order of what depends on the number of its row in the batch, such as `tf.range`.
NUMBERED = ("numbered",)

#: The order of pairs of rows in unlike orders.
UNLIKE = ("unlike",)

# How a variable enters: `v` itself plus other terms, a multiple of it, or otherwise.
SAME, SCALED, OTHERWISE = 0, 1, 2

FIXED, VARIABLE, SELECTED = 0, 1, 2

LOCAL_TERMS = frozenset({Term.ROWS, Term.MEAN, Term.SUM, Term.OTHER})
SHARES = frozenset({Term.SHARE, Term.MIXED, Term.REPORTED})
FACTORS = frozenset({Term.FACTOR, Term.REPORT_FACTOR})
SHARDS = frozenset({Term.SHARD, Term.SHARD_NUMBER})


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An abstract value.

    Args:
      terms: the kinds of its terms; none: 0, or a tensor that is no number.
      axes: the axes along which entries belong to rows: one; two for pairs of rows.
        -1 is the index in a list of tensors.
      order: None: entries are in the order of the rows; else identifies another one.
      each: whether every row has a FIXED number of entries, a VARIABLE one, or only
        SELECTED rows have any.
      per_row: that number, if it is FIXED and known.
      power: times n to this power; None: another function of n, if `counts` is in
        `local`.
      entries: static number of entries that a SUM added up; None: unknown.
      cross: how several rows are combined.
      local: why it may differ by replica: "rows", "counts", "drawn", "metric".
      of_all: whether it depends on rows of all replicas, through an exchange.
      reads: variables by their handles' ids, and how each enters.
      of_share: whether it depends on a factor of a loss in any way.
      target: of a gradient: the value of the number that it is a gradient of.
      lost: the ops past which the analysis could not follow rows or a loss.
      by_hand: whether it was divided by a multiple of the number of replicas.
    """

    terms: frozenset[Term] = frozenset()
    axes: tuple[int, ...] = ()
    order: Hashable = None
    each: int = FIXED
    per_row: int | None = 1
    power: int | None = 0
    entries: int | None = None
    cross: frozenset[Crossing] = frozenset()
    local: frozenset[str] = frozenset()
    of_all: bool = False
    reads: frozenset[tuple[int, int]] = frozenset()
    of_share: bool = False
    target: Value | None = None
    lost: frozenset[str] = frozenset()
    by_hand: bool = False

    def but(self, **changes: Any) -> Value:
        # As `dataclasses.replace`, which takes four times as long.
        made = object.__new__(Value)
        for name in _FIELDS:
            found = changes[name] if name in changes else getattr(self, name)
            object.__setattr__(made, name, found)
        return made

    def crossed(self, kind: str, op: str) -> Value:
        return self.but(cross=self.cross | {Crossing(kind, op)})

    @property
    def is_of_replica(self) -> bool:
        """Whether it depends on this replica's rows, not only on their number."""
        return "rows" in self.local

    @property
    def is_of_own_rows(self) -> bool:
        """Whether it depends on this replica's rows, or on their number."""
        return self.is_of_replica or "counts" in self.local

    @property
    def is_telling(self) -> bool:
        """Whether what is not known of it may matter."""
        return self.is_of_replica or self.of_share or bool(self.cross)

    @property
    def is_of_rows_in_order(self) -> bool:
        """Whether it has an entry for each row along its first axis, in their order."""
        return self.axes == (0,) and self.order is None and self.each == FIXED

    @property
    def is_one_row(self) -> bool:
        """Whether it is of one row, as within `tf.map_fn`."""
        return self.terms == {Term.ROWS} and not self.axes

    @property
    def is_scaled_by_count(self) -> bool:
        """Whether it changes with the number of this replica's rows, as one device's
        does with that of the batch."""
        return self.power != 0 and "counts" in self.local and bool(self.terms)

    @property
    def is_shape(self) -> bool:
        """Whether it is the shape of a tensor with rows."""
        return isinstance(self.order, tuple) and self.order[:1] == ("shape",)


_FIELDS = tuple(field.name for field in dataclasses.fields(Value))
PLAIN = frozenset({Term.CONSTANT, Term.REPLICATED})
ZERO = Value()
CONSTANT = Value(terms=frozenset({Term.CONSTANT}))
REPLICATED = Value(terms=frozenset({Term.REPLICATED}))
UNKNOWN = Value(terms=frozenset({Term.UNKNOWN}))
#: The result of an exchange: equal on all replicas, and of the rows of all.
OF_ALL = Value(terms=frozenset({Term.REPLICATED}), of_all=True)
PART_OF_ROWS = Value(terms=frozenset({Term.UNKNOWN}), local=frozenset({"rows"}))
ROW_SOURCE = Value(terms=frozenset({Term.ROWS}), axes=(0,), local=frozenset({"rows"}))


def dependencies(values: Iterable[Value]) -> dict[str, Any]:
    """The parts of a result that only grow: on what it depends."""
    values = list(values)
    return {
        "cross": frozenset().union(*[v.cross for v in values]),
        "local": frozenset().union(*[v.local for v in values]),
        "of_all": any([v.of_all for v in values]),
        "of_share": any([v.of_share for v in values]),
        "target": next((v.target for v in values if v.target is not None), None),
        "lost": frozenset().union(*[v.lost for v in values]),
        "by_hand": any([v.by_hand for v in values]),
    }


def reads_of(values: Iterable[Value], least: int) -> frozenset[tuple[int, int]]:
    """The variables read in `values`, each at least as indirectly as `least`."""
    found: dict[int, int] = {}
    for value in values:
        for handle, how in value.reads:
            found[handle] = max(found.get(handle, least), how)
    return frozenset(found.items())


def _per_row(values: Iterable[Value]) -> int | None:
    found = {v.per_row for v in values if v.axes}
    return found.pop() if len(found) == 1 else None if found else 1


def added(values: Iterable[Value], op: str) -> Value:
    """The sum of values whose axes are those of the result."""
    values = list(values)
    if len(values) == 1:
        return values[0]
    axes, order, crossing = aligned(values)
    terms = frozenset().union(*(v.terms for v in values))
    # n - 1 is no power of n.
    powers = {None if v.is_shape else v.power for v in values if v.terms}
    once: dict[int, int] = {}
    for value in values:
        for handle, how in value.reads:
            once[handle] = max(SCALED, how) if handle in once else how
    result = Value(
        terms=terms,
        axes=axes,
        order=order,
        each=max(v.each for v in values),
        per_row=_per_row(values),
        power=powers.pop() if len(powers) == 1 else None if powers else 0,
        entries=next((v.entries for v in values if v.entries is not None), None),
        reads=frozenset(once.items()),
        **dependencies(values),
    )
    is_of_rows = axes or any(v.is_one_row for v in values)
    if Term.ROWS in terms and is_of_rows and terms & LOCAL_TERMS - {Term.ROWS}:
        # Such as x - mean(x): each entry depends on all rows.
        result = result.but(terms=terms - {Term.MEAN, Term.SUM, Term.OTHER})
        crossing = crossing or NORMALIZED
    if axes and Term.ROWS in result.terms:
        # Each entry is a function of its row, whatever else is added to it.
        result = result.but(terms=result.terms - PLAIN - {Term.COUNT})
    if Term.ROWS in terms and terms & SHARES:
        result = result.but(terms=(terms - SHARES) | {Term.MIXED})
    return result.crossed(crossing, op) if crossing else result


def times(one: Value, other: Value, op: str, *, divided: bool = False) -> Value:
    """The product of two values whose axes are those of the result; or a quotient."""
    axes, order, crossing = aligned([one, other])
    result = Value(
        axes=axes,
        order=order,
        each=max(one.each, other.each),
        per_row=_per_row([one, other]),
        entries=one.entries if one.entries is not None else other.entries,
        reads=_reads_of_both(one, other, OTHERWISE if divided else SCALED),
        **dependencies([one, other]),
    )
    power = _power(one, other, divided)
    factors = [v for v in (one, other) if v.terms & FACTORS]
    if factors and not (divided and factors == [other]):
        found = _with_factor(one, other, factors)
        lost = lost_in([one, other])
        return result.but(
            terms=frozenset({found}), of_share=True, power=power, lost=lost
        )
    parts = (one.terms | other.terms) & SHARDS
    if parts:
        return result.but(terms=parts)
    shares = [v for v in (one, other) if v.terms & SHARES or v.of_share]
    if shares:
        rest = other if shares[0] is one else one
        is_linear = len(shares) == 1 and not (divided and shares[0] is other)
        if is_linear and not rest.terms & LOCAL_TERMS:
            return result.but(terms=shares[0].terms, power=power)
        if not is_linear or not shares[0].axes or shares[0].terms != {Term.SHARE}:
            return result.but(terms=frozenset({Term.MIXED}))
        # Row by row: a share of weighted rows.
        result = result.but(terms=shares[0].terms)
        crossing = crossing or (None if rest.axes else NORMALIZED)
        return result.crossed(crossing, op) if crossing else result
    if Term.UNKNOWN in one.terms | other.terms:
        return result.but(terms=frozenset({Term.UNKNOWN}))
    if not one.terms or (not other.terms and not divided):
        return result.but(terms=frozenset())
    result = result.but(terms=_product_terms(one, other, divided), power=power)
    if power != 0 and result.terms & {Term.MEAN, Term.SUM}:
        result = scaled_by_count(result)
    crossing = crossing or _crossing_of_product(one, other, divided)
    if crossing and result.target is not None and result.target.of_share:
        # Such as gradients of a share by rows, over the norm of those of all rows.
        return result.but(terms=frozenset({Term.MIXED}), of_share=True)
    return result.crossed(crossing, op) if crossing else result


def _with_factor(one: Value, other: Value, factors: Sequence[Value]) -> Term:
    """The kind of a product with a factor of a loss."""
    factor, *more = factors
    rest = other if factor is one else one
    if len(factor.terms) > 1 or more:
        return Term.MIXED
    if factor.terms == {Term.REPORT_FACTOR}:
        return Term.REPORTED
    is_mixed = rest.of_share and (not factor.power or rest.terms != {Term.SHARE})
    return Term.MIXED if is_mixed else Term.SHARE


def _crossing_of_product(one: Value, other: Value, divided: bool) -> str | None:
    """How rows depend on each other in a product or quotient, but for their order."""
    if one.is_one_row or other.is_one_row:
        return None
    if not (one.terms & LOCAL_TERMS and other.terms & LOCAL_TERMS):
        is_of_all = other.terms & (LOCAL_TERMS - {Term.ROWS})
        return NORMALIZED if divided and is_of_all else None
    of_rows = [v for v in (one, other) if v.axes and Term.ROWS in v.terms]
    if len(of_rows) == 2:
        return None
    # The count may have a constant added to it, or be its maximum with 1.
    is_count = other.terms & LOCAL_TERMS in ({Term.SUM}, {Term.OTHER})
    if divided and one.terms == {Term.SUM} and is_count:
        return QUOTIENT
    return NORMALIZED if of_rows or divided else NOT_LINEAR


def _reads_of_both(one: Value, other: Value, least: int) -> frozenset[tuple[int, int]]:
    """The variables read in a product: v v is no multiple of v. Those of the second
    are read at least as indirectly as `least`."""
    found = dict(reads_of([one], SCALED))
    for handle, how in reads_of([other], least):
        found[handle] = OTHERWISE if handle in found else how
    return frozenset(found.items())


def _product_terms(one: Value, other: Value, divided: bool) -> frozenset[Term]:
    local = [v for v in (one, other) if v.terms & LOCAL_TERMS]
    if not local:
        terms = one.terms | other.terms
        if Term.COUNT in terms and Term.REPLICATED not in terms:
            return frozenset({Term.COUNT})
        is_constant = one.terms | other.terms == {Term.CONSTANT}
        return frozenset({Term.CONSTANT if is_constant else Term.REPLICATED})
    if len(local) == 1 and not (divided and local[0] is other):
        return local[0].terms
    if any(v.axes for v in local) or all(v.is_one_row for v in local):
        return frozenset({Term.ROWS})
    return frozenset({Term.OTHER})


def _power(one: Value, other: Value, divided: bool) -> int | None:
    if None in (one.power, other.power) or one.is_shape or other.is_shape:
        return None
    sign = -1 if divided else 1
    return one.power + sign * other.power  # type: ignore[operator]


def scaled_by_count(value: Value) -> Value:
    """Sums divided by the number of rows are means, and means times it are sums."""
    if value.power is None and value.terms & {Term.SUM, Term.MEAN}:
        return value.but(terms=value.terms - {Term.SUM, Term.MEAN} | {Term.OTHER})
    if value.terms > {Term.SUM} or value.terms > {Term.MEAN}:
        # Of several terms each has another power then, such as of a sum plus 1.
        shift = {(Term.SUM, -1): Term.MEAN, (Term.MEAN, 1): Term.SUM}
        shift.update(((term, value.power), Term.COUNT) for term in PLAIN)  # type: ignore[misc]
        terms = frozenset(shift.get((t, value.power), t) for t in value.terms)  # type: ignore[arg-type]
        return value.but(terms=terms, power=None)
    if value.terms == {Term.SUM} and value.power == -1:
        return value.but(terms=frozenset({Term.MEAN}), power=0)
    if value.terms == {Term.MEAN} and value.power == 1:
        return value.but(terms=frozenset({Term.SUM}), power=0)
    return value


def applied(values: Iterable[Value], op: str) -> Value:
    """A function of each entry that is not linear."""
    values = list(values)
    axes, order, crossing = aligned(values)
    terms = frozenset().union(*(v.terms for v in values))
    result = Value(
        axes=axes,
        order=order,
        each=max((v.each for v in values), default=FIXED),
        per_row=_per_row(values),
        power=0 if all(v.power == 0 for v in values) else None,
        reads=reads_of(values, OTHERWISE),
        **dependencies(values),
    )
    if terms & SHARDS:
        return result.but(terms=terms & SHARDS)
    if terms & (SHARES | FACTORS) or (result.of_share and Term.UNKNOWN in terms):
        return result.but(terms=frozenset({Term.MIXED}))
    if Term.UNKNOWN in terms:
        return result.but(terms=frozenset({Term.UNKNOWN}))
    local = terms & LOCAL_TERMS
    if local:
        is_of_rows = bool(axes) and Term.ROWS in local
        found = Term.ROWS if is_of_rows else Term.OTHER
        if is_of_rows and local - {Term.ROWS}:
            crossing = crossing or NORMALIZED
        elif not is_of_rows and local & {Term.MEAN, Term.SUM}:
            crossing = crossing or NOT_LINEAR
        if local == {Term.ROWS} and not axes:
            found = Term.ROWS  # of one row
        result = result.but(terms=frozenset({found}))
        return result.crossed(crossing, op) if crossing else result
    for kind in (Term.COUNT, Term.REPLICATED, Term.CONSTANT):
        if kind in terms:
            return result.but(terms=frozenset({kind}))
    # Such as the cosine of 0.
    return result.but(terms=frozenset({Term.CONSTANT}))


def aligned(values: Iterable[Value]) -> tuple[tuple[int, ...], Hashable, str | None]:
    """The axes and order of an elementwise result; and the kind of crossing, if any."""
    values = list(values)
    with_rows = [v for v in values if v.axes]
    if not with_rows:
        return (), None, None
    axes = tuple(sorted({axis for v in with_rows for axis in v.axes}))
    of_rows = [v for v in with_rows if v.local]
    # With the rank it is the number among all rows.
    has_rank = any("rank" in v.local for v in values)
    numbered = any(v.order == NUMBERED for v in of_rows) and not has_rank
    orders = {v.order for v in of_rows if v.order != NUMBERED} or {None}
    crossing = None
    if len(axes) == 1 and len(orders) > 1:
        crossing = JOINED
    several = UNLIKE if len(axes) > 1 else None
    order = orders.pop() if len(orders) == 1 else several
    return axes[:2], NUMBERED if numbered and order is None else order, crossing


def joined(values: Iterable[Value]) -> Value:
    """A value that is one of several: of a branch, or before and after a loop."""
    values = list(values)
    first = values[0]
    if all(value == first for value in values[1:]):
        return first
    # What is 0 in a branch, such as of a replica without rows, is no other kind.
    full = [value for value in values if value.terms] or values
    axes = {v.axes for v in full}
    orders = {v.order for v in full}
    powers = {v.power for v in full}
    is_one = len(axes) == 1
    terms = frozenset().union(*(v.terms for v in values))
    return Value(
        terms=terms if is_one else frozenset({Term.UNKNOWN}),
        axes=axes.pop() if is_one else (),
        order=orders.pop() if len(orders) == 1 else None,
        each=max(v.each for v in values),
        per_row=_per_row(values),
        power=powers.pop() if len(powers) == 1 else None,
        reads=reads_of(values, SAME),
        **dependencies(values),
    )


def unknown(values: Iterable[Value]) -> Value:
    """The value of an op without a rule: that of its only input with rows or a loss;
    of several nothing is known, and no warning follows from it."""
    values = list(values)
    telling = [v for v in values if v.local or v.of_share or v.cross]
    if not telling:
        return _plain(values)
    return Value(
        terms=frozenset({Term.UNKNOWN}),
        reads=reads_of(values, OTHERWISE),
        **dependencies(values),
    )


def _plain(values: list[Value]) -> Value:
    terms = frozenset().union(*(v.terms for v in values)) or {Term.CONSTANT}
    for kind in (Term.UNKNOWN, Term.COUNT, Term.REPLICATED, Term.CONSTANT):
        if kind in terms:
            found = frozenset({kind})
            return Value(
                terms=found,
                reads=reads_of(values, OTHERWISE),
                power=None if kind is Term.COUNT else 0,
                **dependencies(values),
            )
    return REPLICATED


def gradient_of(
    targets: Iterable[Value], source: Value | None, handle: Any = None
) -> Value:
    """The value of a gradient of the sum of `targets` by `source`, or by a weight with
    this handle."""
    targets = list(targets)
    if any(Term.ROWS in v.terms and not v.axes for v in targets):
        # Of the loss of one row, in a loop over rows: what is made of it is by hand.
        return joined([*targets, source] if source is not None else targets)
    # A gradient is that of the sum of all entries.
    sums = [
        v.but(terms=v.terms - {Term.ROWS} | {Term.SUM}) if Term.ROWS in v.terms else v
        for v in targets
    ]
    whole = [scaled_by_count(v.but(axes=(), order=None)) for v in sums]
    target = added(whole, "gradient")
    terms = target.terms - {Term.CONSTANT, Term.COUNT}
    result = Value(
        terms=terms,
        power=target.power,
        local=target.local,
        of_all=target.of_all,
        of_share=target.of_share,
        reads=frozenset(() if handle is None else ((handle, OTHERWISE),)),
        target=target,
        lost=target.lost,
        by_hand=target.by_hand,
    )
    if source is None or not source.axes:
        return result
    # Of rows: an entry for each; the loss' own mixing of rows is reported with it.
    rows = result.but(axes=source.axes, order=source.order, each=source.each)
    if terms == {Term.SHARE} and not target.cross:
        # Of the whole loss, as on one device.
        return rows.but(terms=frozenset({Term.ROWS}), of_share=False)
    if target.of_share:
        return rows.but(terms=frozenset({Term.MIXED}))
    power = target.power
    if Term.MEAN in terms and power is not None:
        power = power - 1 if terms == {Term.MEAN} else None
    local = target.local | ({"counts"} if Term.MEAN in terms else set())
    return rows.but(terms=frozenset({Term.ROWS}), power=power, local=local)


def share_of(values: Sequence[Value]) -> Value:
    """The value of a replica's share of a mean, which is made of `values`."""
    powers = [value.power for value in values if value.terms]
    changes = {"of_share": True, "lost": lost_in(values)}
    return Value(
        terms=frozenset({Term.SHARE}),
        power=None if None in powers else sum(powers),  # type: ignore[arg-type]
        reads=reads_of(values, OTHERWISE),
        **{**dependencies(values), **changes},
    )


def lost_in(values: Iterable[Value]) -> frozenset[str]:
    """The ops past which nothing is known of `values`: of a mask or a place that such
    an op gave, what it selects may be known again."""
    lost = [value.lost for value in values if Term.UNKNOWN in value.terms]
    return frozenset().union(*lost)
