"""What the analysis says of graphs, and that the numbers of two replicas agree with it.

Each row of `tests/support/lint_rules.py` is traced, without a strategy, and compared
with what mathematics says. It is also computed on the whole batch and on two parts:
what a value claims must hold, and what depends on several rows must not combine.
"""

import ast
import functools
import inspect
import re
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tests.support.lint_rules import TABLE, TABLES, rows_of
from tfdp._private.step_ops import operations_within
from tfdp.lint.analysis import Analysis
from tfdp.lint.arithmetic import function as elementwise
from tfdp.lint.findings import (
    Cures,
    change_of_gradients,
    crossing_of,
    is_no_mean,
    unscaled_part,
)
from tfdp.lint.registry import GradientOf, key_of, register, register_exchanged
from tfdp.lint.rules import RULES
from tfdp.lint.values import (
    CHOSEN,
    FIXED,
    JOINED,
    NORMALIZED,
    NOT_LINEAR,
    OTHERWISE,
    PAIRED,
    QUOTIENT,
    REPLICATED,
    ROW_SOURCE,
    SAME,
    SCALED,
    SELECTED,
    VARIABLE,
    Term,
    Value,
)

ROWS, PARTS = 8, (slice(0, 5), slice(5, 8))
CROSSINGS = {
    "paired": PAIRED,
    "joined": JOINED,
    "normalized": NORMALIZED,
    "quotient": QUOTIENT,
    "chosen": CHOSEN,
    "nonlinear": NOT_LINEAR,
}
EACH = {"variable": VARIABLE, "selected": SELECTED}
LOCAL = {Term.ROWS, Term.MEAN, Term.SUM, Term.OTHER}
random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(ROWS, 6)).astype("float32"),
    "y": random.normal(size=(ROWS, 6)).astype("float32"),
    "v": random.normal(size=ROWS).astype("float32"),
    "k": np.array([3, 1, 4, 1, 5, 3, 2, 0], "int32"),
    "m": np.array([1, 0, 1, 1, 0, 0, 1, 0], bool),
    "t": random.normal(size=(ROWS, 4, 6)).astype("float32"),
    "i": random.normal(size=(ROWS, 8, 8, 3)).astype("float32"),
    "g": random.normal(size=(ROWS, 4, 4, 4, 2)).astype("float32"),
    "w": random.normal(size=(6, 6)).astype("float32"),
    "u": random.normal(size=6).astype("float32"),
    "p": np.array(1, "int32"),
}
SOURCES = {"w": REPLICATED, "u": REPLICATED, "p": REPLICATED}
SOURCES["f"] = Value(terms=frozenset({Term.FACTOR}), of_share=True)
SOURCES["r"] = Value(terms=frozenset({Term.REPORT_FACTOR}), of_share=True)


class Traced(NamedTuple):
    value: Value
    graph: object


@functools.cache
def function_of(expression):
    """An expression as a function of the arguments that it names."""
    parts = ast.walk(ast.parse(expression, mode="eval"))
    used = {part.id for part in parts if isinstance(part, ast.Name)}
    names = [name for name in (*DATA, "f", "r") if name in used] or ["x"]
    return eval(f"lambda {', '.join(names)}: {expression}", globals())


@functools.cache
def traced(expression, is_static=False):
    """The value of the expression."""
    function = function_of(expression)
    names = list(inspect.signature(function).parameters)
    specs = []
    for name in names:
        data = DATA.get(name, np.float32(1))
        is_of_rows = name not in SOURCES and not is_static
        shape = (None, *data.shape[1:]) if is_of_rows else data.shape
        specs.append(tf.TensorSpec(shape, data.dtype))
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    sources = {
        key_of(tensor): SOURCES.get(name, ROW_SOURCE)
        for name, tensor in zip(names, graph.inputs, strict=False)
    }
    (result,) = graph.outputs
    return Traced(Analysis(sources, ROWS if is_static else None).value(result), graph)


def computed(expression, part):
    """Its number on a part of the rows."""
    function = function_of(expression)
    names = inspect.signature(function).parameters
    count = len(DATA["x"][part])
    scalars = {"f": np.float32(count / ROWS), "r": np.float32(ROWS / count)}
    given = [
        tf.constant(
            scalars.get(name, DATA.get(name)) if name in SOURCES else DATA[name][part]
        )
        for name in names
    ]
    return np.asarray(function(*given), "float64")


class Expected(NamedTuple):
    terms: set
    axes: tuple
    each: int
    power: int | None
    cross: set
    local: set
    is_static: bool
    has_numbers: bool


def expected_of(text):
    """Such as "ROWS@0 selected chosen"; "*": the numbers are not compared."""
    terms, axes, each, power, cross, local = set(), (), FIXED, 0, set(), set()
    words = text.split()
    for word in words:
        term, _, places = word.partition("@")
        if term in Term.__members__ or places:
            terms |= {Term[term]} if term else set()
            axes = tuple(int(place) for place in places.split(",") if place) or axes
        elif word in CROSSINGS:
            cross.add(CROSSINGS[word])
        elif word in EACH:
            each = EACH[word]
        elif word[0] == "^":
            power = None if word == "^?" else int(word[1:])
        elif word[0] == "+":
            local.add(word[1:])
        else:
            assert word in ("ZERO", "static", "*", "-rows")
    if terms & (LOCAL | {Term.SHARE, Term.MIXED}) or cross:
        local.add("rows")
    if "-rows" in words:
        local.discard("rows")
    return Expected(
        terms, axes, each, power, cross, local, "static" in words, "*" not in words
    )


def combinations(parts, axis):
    """What the results of two replicas may be combined to, by what they are."""
    counts = [len(DATA["x"][part]) / ROWS for part in PARTS]
    found = {}
    if parts[0].shape == parts[1].shape:
        found["mean"] = sum(n * p for n, p in zip(counts, parts, strict=True))
        found["sum"] = parts[0] + parts[1]
        if is_same(*parts):
            found["replicated"] = parts[0]
    if parts[0].ndim > axis:
        rest = [np.delete(part.shape, axis).tolist() for part in parts]
        if rest[0] == rest[1]:
            found["rows"] = np.concatenate(parts, axis)
    return found


def claim_of(value):
    """How the results of replicas combine, as far as the value says."""
    if value.cross or value.power or value.order is not None or len(value.axes) > 1:
        return None
    if value.power is None or (value.axes and value.terms & (LOCAL - {Term.ROWS})):
        return None
    plain = {Term.CONSTANT, Term.REPLICATED}
    if value.axes and value.terms <= {Term.ROWS, Term.CONSTANT}:
        return "rows"
    if value.terms <= plain and not value.axes:
        return "replicated"
    if Term.MEAN in value.terms and value.terms <= {Term.MEAN} | plain:
        return "mean"
    return "sum" if value.terms in ({Term.SUM}, {Term.SHARE}) else None


def is_same(found, whole):
    # Sums of at most 8 * 6 numbers of size 1, squared twice, in float32.
    return found.shape == whole.shape and np.allclose(found, whole, 1e-4, 1e-4)


def mean(z):
    return tf.reduce_mean(z)


def total(z):
    return tf.reduce_sum(z)


def count(z):
    return tf.cast(tf.shape(z)[0], tf.float32)


def share(f, z):
    return f * tf.reduce_mean(z)


@tf.function(autograph=False)
def scaled_sum(z, factor):
    return factor * tf.reduce_sum(z)


@tf.function(autograph=False)
def squared(z):
    return z * z


@tf.function(autograph=False)
def squared_twice(z):
    return squared(squared(z))


def matrices(t):
    """A positive definite matrix of each row."""
    return tf.matmul(t, t, transpose_a=True) + 3.0 * tf.eye(6)


def moved_by(i, v):
    """Images, each moved by a number of its own row."""
    zeros, ones = tf.zeros_like(v), tf.ones_like(v)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=i,
        transforms=tf.stack([ones, zeros, v, zeros, ones, v, zeros, zeros], 1),
        output_shape=[8, 8],
        fill_value=0.0,
        interpolation="BILINEAR",
    )


@functools.cache
def words_table():
    """A table of values by number, as preprocessing layers have them by word."""
    with tf.init_scope():
        pairs = tf.lookup.KeyValueTensorInitializer(
            tf.range(9), tf.linspace(0.0, 1.0, 9)
        )
        return tf.lookup.StaticHashTable(pairs, -1.0)


def every_function(x, y):
    """The sum of all functions that `RULES` calls elementwise, of numbers in (0, 1)."""
    x, y, results = 0.1 + 0.8 * tf.sigmoid(x), 0.1 + 0.8 * tf.sigmoid(y), []
    for name in sorted(n for n, rule in RULES.items() if rule is elementwise):
        op = getattr(tf.raw_ops, name)
        defaults = inspect.signature(op).parameters.values()
        names = [one.name for one in defaults if one.default is one.empty]
        given = [x + 1 if name == "Acosh" else x, y, y + 1][: len(names)]
        if name.startswith("Logical"):
            given = [part > 0.5 for part in given]
        results.append(tf.cast(op(**dict(zip(names, given, strict=True))), x.dtype))
    return tf.add_n(results)


def raw(name, x):
    """Older ops that draw from a seed."""
    limits = {"minval": 0, "maxval": 9} if name == "UniformInt" else {}
    op = getattr(tf.raw_ops, f"StatelessRandom{name}")
    other = tf.raw_ops.StatelessTruncatedNormal(shape=[2], seed=[1, 2])
    return tf.cast(op(shape=[2], seed=[1, 2], **limits), tf.float32) + other


@functools.cache
def state():
    """A variable and a generator, which graphs capture."""
    with tf.init_scope():
        kept = tf.Variable(DATA["w"], trainable=False)
        return kept, tf.random.Generator.from_seed(1)


def variable():
    return state()[0].value()


def captured(outer):
    return tf.function(lambda z: z * outer, autograph=False)


def popped(x):
    """The last of two rows' functions in a list."""
    empty = tf.raw_ops.EmptyTensorList(
        element_shape=[-1, 6], max_num_elements=2, element_dtype=tf.float32
    )
    for part in (x, 2 * x):
        empty = tf.raw_ops.TensorListPushBack(input_handle=empty, tensor=part)
    return tf.raw_ops.TensorListPopBack(
        input_handle=empty, element_shape=[-1, 6], element_dtype=tf.float32
    )[1]


def over_steps(t, start):
    """A recurrence over time steps, a state for each row."""
    return tf.while_loop(
        lambda step, _: step < 4,
        lambda step, state: (step + 1, tf.tanh(state + t[:, step])),
        (0, start),
    )[1]


def over_rows(x, initial=0.0):
    """A sum over rows, one by one."""
    return tf.while_loop(
        lambda row, _: row < tf.shape(x)[0],
        lambda row, so_far: (row + 1, so_far + tf.reduce_sum(tf.gather(x, row))),
        (0, initial),
    )[1]


@pytest.mark.parametrize("name", TABLE)
def test_a_value_is_what_mathematics_says(name):
    expression, text = TABLE[name]
    expected = expected_of(text)
    value = traced(expression, expected.is_static).value
    assert (value.terms, value.axes) == (expected.terms, expected.axes)
    assert {one.kind for one in value.cross} == expected.cross
    assert value.each == expected.each
    assert value.power == expected.power
    local = {each.partition(" ")[0] for each in value.local}
    local |= {"all"} if value.of_all else set()
    assert local - {"counts"} == expected.local - {"counts"}


@pytest.mark.parametrize("name", TABLE)
def test_the_numbers_of_two_replicas_agree_with_it(name):
    expression, text = TABLE[name]
    if not expected_of(text).has_numbers:
        return
    value = traced(expression, expected_of(text).is_static).value
    whole, *parts = (computed(expression, part) for part in (slice(None), *PARTS))
    found = combinations(parts, value.axes[0] if value.axes else 0)
    claim = claim_of(value)
    if claim is not None:
        assert is_same(found[claim], whole)
    elif value.cross or value.terms & {Term.OTHER, Term.MIXED}:
        same = [kind for kind, result in found.items() if is_same(result, whole)]
        assert not same


WITHOUT_ROW = {
    "EagerPyFunc": "as PyFunc",
    "IteratorGetNext": "of an input pipeline",
    **dict.fromkeys(
        ("StatefulStandardNormalV2", "StatefulTruncatedNormal", "StatefulUniform"),
        "of older generators, as RngReadAndSkip",
    ),
    "StatefulUniformInt": "of older generators, as RngReadAndSkip",
    "StatelessRandomGetAlg": "of devices other than the CPU",
    "PyFuncStateless": "as PyFunc",
    "Conv3DBackpropInputV2": "as Conv2DBackpropInput",
    "TPUReplicatedInput": "of TPU programs",
}


def test_every_rule_has_a_row():
    """Or a reason why not."""
    types = {
        op.type
        for expression, text in TABLE.values()
        for op in operations_within(
            traced(expression, expected_of(text).is_static).graph.get_operations()
        )
    }
    assert sorted(set(RULES) - types - set(WITHOUT_ROW)) == []
    assert not set(WITHOUT_ROW) & types


def test_no_row_is_there_twice():
    assert len(TABLE) == sum(len(rows_of(table)) for table in TABLES.values())


READS = {
    "variable() + mean(x)": SAME,
    "variable() - 2.0": SAME,
    "tf.identity(variable())": SAME,
    "tf.where(p > 0, variable(), 0.0)": SAME,
    "tf.cond(p > 0, lambda: variable() + mean(x), lambda: variable())": SAME,
    "tf.cond(p > 0, lambda: variable() + mean(x), lambda: 2 * variable())": SCALED,
    "0.9 * variable() + 0.1 * mean(x)": SCALED,
    "variable() * mean(x)": SCALED,
    "variable() / 2.0": SCALED,
    "variable() + variable()": SCALED,
    "squared(variable())": OTHERWISE,
    "variable() * variable()": OTHERWISE,
    "tf.sqrt(variable())": OTHERWISE,
    "1 / variable()": OTHERWISE,
    "variable() / (1.0 + variable())": OTHERWISE,
    "tf.maximum(variable(), mean(x))": OTHERWISE,
    "mean(x) + 2.0": None,
}


@pytest.mark.parametrize("expression", READS)
def test_how_a_variable_enters(expression):
    found = [how for _, how in traced(expression).value.reads]
    assert found == ([] if READS[expression] is None else [READS[expression]])


def gradient(change, scales=True, loss=None):
    """What `change` makes of a gradient by `w`; of a replica's share, or of a mean."""

    def function(f, x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            number = mean(tf.square(x @ w))
            number = f * number if scales else number
        found = tape.gradient(number, w)
        register(found, GradientOf((number,), None, None))
        return change(found, w)

    return function


LINEAR, OWN, ADDED = None, "their own values", "is no gradient"
CHANGES = {
    "as it is": (lambda g, w: g, LINEAR),
    "halved": (lambda g, w: 0.5 * g, LINEAR),
    "by a weight": (lambda g, w: g / (1.0 + tf.norm(w)), LINEAR),
    "cast": (lambda g, w: tf.cast(tf.cast(g, tf.float64), tf.float32), LINEAR),
    "transposed": (lambda g, w: tf.transpose(g), LINEAR),
    "flat": (lambda g, w: tf.reshape(g, [-1]), LINEAR),
    "centralised": (lambda g, w: g - tf.reduce_mean(g, 0, keepdims=True), LINEAR),
    "times a matrix": (lambda g, w: g @ w, LINEAR),
    "sum of two": (lambda g, w: g + 2 * g, LINEAR),
    "branch": (lambda g, w: tf.cond(w[0, 0] > 0, lambda: g, lambda: 2 * g), LINEAR),
    "mean of all": (lambda g, w: tf.reduce_mean(g), LINEAR),
    "norm clipped": (lambda g, w: tf.clip_by_norm(g, 0.01), OWN),
    "global norm clipped": (lambda g, w: tf.clip_by_global_norm([g], 0.01)[0][0], OWN),
    "values clipped": (lambda g, w: tf.clip_by_value(g, -0.01, 0.01), OWN),
    "normalised": (lambda g, w: g / tf.norm(g), OWN),
    "sign": (lambda g, w: tf.sign(g), OWN),
    "square": (lambda g, w: g * g, OWN),
    "adaptive": (lambda g, w: g * tf.minimum(1.0, 0.01 * tf.norm(w) / tf.norm(g)), OWN),
    "largest": (lambda g, w: tf.where(tf.abs(g) > 0.1, g, 0.0), OWN),
    "decay": (lambda g, w: g + 0.01 * w, ADDED),
    "constant": (lambda g, w: g + 0.01, ADDED),
    "noise": (lambda g, w: g + tf.random.stateless_normal([6, 6], [1, 2]), ADDED),
}
EXCHANGED = {
    "by the norm of the sum": (
        lambda g, w: g / tf.norm(register_exchanged(g * 1.0)),
        LINEAR,
    ),
    "summed": (lambda g, w: register_exchanged(g * 1.0), "summed over the replicas"),
    "sum, halved": (lambda g, w: 0.5 * register_exchanged(g * 1.0), "summed over"),
}


def value_of_gradient(function):
    shapes = [(), (None, 6), (6, 6)]
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    values = (SOURCES["f"], ROW_SOURCE, REPLICATED)
    sources = {key_of(t): v for t, v in zip(graph.inputs, values, strict=True)}
    return Analysis(sources).value(graph.outputs[0])


@pytest.mark.parametrize("scales", [True, False], ids=["share", "mean"])
@pytest.mark.parametrize("name", [*CHANGES, *EXCHANGED])
def test_changes_of_gradients(name, scales):
    change, text = {**CHANGES, **EXCHANGED}[name]
    found = value_of_gradient(gradient(change, scales))
    sentence = change_of_gradients(found, scales_by_hand=False)
    assert sentence is None if text is None else text in sentence
    if text in (ADDED, "summed over the replicas"):
        assert change_of_gradients(found, scales_by_hand=True) is None


@pytest.mark.parametrize("name", CHANGES)
def test_linear_changes_commute_with_the_sum(name):
    change, text = CHANGES[name]
    function, results = gradient(change), []
    for part in (slice(None), *PARTS):
        x = DATA["x"][part]
        given = (np.float32(len(x) / ROWS), x, DATA["w"])
        results.append(function(*map(tf.constant, given)).numpy())
    assert is_same(results[1] + results[2], results[0]) == (text is LINEAR)


@pytest.mark.parametrize(
    "expression,words",
    {
        "mean(tf.matmul(x, x, transpose_b=True))": "paired with .*local_mean",
        "mean(x * tf.reverse(x, [0]))": "joined with other rows .*all_rows",
        "total(tf.math.top_k(v, 2)[0])": "chosen, sorted or numbered .*all_rows",
        "x - tf.reduce_mean(x, 0)": "a number of all rows .*all_sum",
        "tf.sqrt(mean(x * x))": "a root, .*all_rows",
        "mean(tf.sort(v) - mean(v))": "chosen",
        "mean(x * x)": None,
    }.items(),
)
def test_the_sentence_about_a_crossing(expression, words):
    cross = traced(expression).value.cross
    sentence = crossing_of(cross, Cures())
    if words is None:
        assert sentence is None
    else:
        assert re.search(words, sentence)
        assert any(repr(one.op) in sentence for one in cross)


@pytest.mark.parametrize(
    "expression,expected",
    {
        "mean(x)": False,
        "mean(x) + 1.0": False,
        "mean(x) * mean(w)": False,
        "mean(w)": False,
        "tf.ones([])": False,
        "share(f, x)": False,
        "tf.math.igamma(tf.abs(x), tf.abs(y))": True,
        "mean(tf.ones_like(x))": False,
        "total(x)": True,
        "mean(x) + total(x)": True,
        "tf.sqrt(mean(x * x))": True,
        "total(x) / total(y * y)": True,
        "count(x)": True,
        "tf.reduce_mean(x, 1)": True,
        "mean(tf.boolean_mask(x, m))": True,
        "mean(x * tf.reverse(x, [0]))": True,
        "tf.reduce_max(x)": True,
    }.items(),
)
def test_what_is_no_mean(expression, expected):
    assert is_no_mean(traced(expression).value) == expected


@pytest.mark.parametrize(
    "expression,words",
    {
        "mean(x)": "a mean over the replica's rows",
        "share(f, x) + mean(x)": "a mean over the replica's rows",
        "tf.sqrt(mean(x * x))": "no sum over them",
        "tf.reduce_mean(x, 1)": "no sum over them",
        "share(f, x) + mean(w)": "such as a penalty",
        "share(f, x) + mean(tf.random.normal([3]))": "draws itself",
        "register_exchanged(mean(x) * 1.0)": "the rows of all replicas, on each",
        "share(f, x)": None,
        "share(f, x) + total(x)": None,
        "share(f, x) + 1.0": None,
        "total(x)": None,
        "tf.square(share(f, x))": None,
        "tf.zeros([])": None,
    }.items(),
)
def test_which_part_is_not_scaled(expression, words):
    value = traced(expression).value
    found = unscaled_part(value, scales_by_hand=False)
    assert found is None if words is None else words in found
    assert unscaled_part(value, scales_by_hand=True) is None
