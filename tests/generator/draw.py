"""How a program is drawn: hypothesis strategies, the simplest choice first."""

import dataclasses

from hypothesis import strategies as st

from tests.generator import outputs
from tests.generator.calls import CALLBACKS
from tests.generator.layers import INPUTS, LAYERS, NEEDS_LENGTH, RANDOM, RECURRENT
from tests.generator.optimizers import OPTIMIZERS, OPTIONS, UNSHARDABLE
from tests.generator.program import (
    Branch,
    Data,
    Layout,
    Optimizer,
    Output,
    Program,
)
from tests.generator.train_steps import TRAIN_STEPS

MOST_LAYERS = 2


def mostly(first, *others, times=1.0):
    """`first` so many times as often as all of the others together."""
    return st.sampled_from([first] * max(1, round(times * len(others))) + [*others])


def layers_that(takes, gives, random):
    """The names, the costly ones half as often."""
    found = [
        name
        for name, layer in LAYERS.items()
        if layer.takes == takes
        and layer.gives == gives
        and (random or name not in RANDOM)
    ]
    return [*found, *(name for name in found if name not in RECURRENT)]


@st.composite
def branches(draw, random, kinds=tuple(INPUTS)):
    kind = draw(st.sampled_from(kinds))
    at = INPUTS[kind].gives
    left_out = NEEDS_LENGTH if INPUTS[kind].is_ragged else ()

    def found(gives):
        names = layers_that(at, gives, random)
        return st.sampled_from([name for name in names if name not in left_out])

    names = list(draw(st.lists(found(at), max_size=1)))
    if at != "vector":
        names.append(draw(found("vector")))
    return Branch(kind, tuple(names))


@st.composite
def output(draw, per_step):
    losses = [
        name
        for name in outputs.LOSSES
        if per_step or not outputs.needs_time_steps(name)
    ]
    loss = draw(mostly("MeanSquaredError", *losses, times=0.3))
    named = outputs.metric_names(loss)
    reductions = ("sum", "mean_with_sample_weight", "mean", "none")
    return Output(
        loss=loss,
        reduction=draw(mostly("sum_over_batch_size", *reductions)),
        per_step=per_step,
        loss_weight=draw(mostly(None, 0.3, 2.0)),
        metrics=draw(mostly((), *((name,) for name in named))),
        weighted_metrics=draw(mostly((), *((name,) for name in named), times=2)),
    )


@st.composite
def optimizer(draw):
    name = draw(st.sampled_from(list(OPTIMIZERS)))
    chosen, groups = [], set()
    for option in draw(mostly((), *_pairs(), times=0.3)):
        if OPTIONS[option][0] not in groups:
            groups.add(OPTIONS[option][0])
            chosen.append(option)
    wrapper = draw(mostly("none", "distributed", "loss_scale", times=1.5))
    if wrapper == "distributed" and "accumulation" in groups:
        chosen = [o for o in chosen if OPTIONS[o][0] != "accumulation"]
    steps = draw(st.sampled_from([1, 2, 3])) if wrapper == "distributed" else 1
    return Optimizer(name, tuple(chosen), wrapper, steps)


def _pairs():
    return [
        *((option,) for option in OPTIONS),
        *((a, b) for a in OPTIONS for b in OPTIONS if OPTIONS[a][0] < OPTIONS[b][0]),
    ]


@st.composite
def data(draw, program):
    source = draw(st.sampled_from(["arrays", "dataset", "generator"]))
    if source == "arrays":
        size = draw(st.sampled_from([8, 4, 6, 5, 7, 12, 3, 2, 1]))
        last = draw(st.integers(1, size))
        batches = (*[size] * draw(st.integers(1, 3)), last)
    else:
        batches = draw(
            st.lists(
                st.sampled_from([8, 4, 6, 3, 5, 1, 2, 7, 11]), min_size=1, max_size=4
            )
        )
    weightings = ["sample_weight", "zero_weights"]
    if _may_weigh_classes(program, source):
        weightings.append("class_weight")
    return Data(
        tuple(batches),
        source,
        draw(mostly("none", *weightings)),
        draw(st.sampled_from([8, 5, 3, 1, 9])),
        draw(st.integers(0, 3)),
    )


def _may_weigh_classes(program, source):
    only = program.outputs[0]
    return (
        len(program.outputs) == 1
        and not only.per_step
        and outputs.LOSSES[only.loss].targets in ("sparse", "one_hot")
    )


@st.composite
def layout(draw):
    replicas, hierarchy = draw(
        st.sampled_from(
            [
                *[(2, "flat")] * 4,
                *[(3, "flat")] * 3,
                *((4, "flat"), (4, (2, 2)), (1, "flat")),
            ]
        )
    )
    return Layout(
        replicas,
        draw(mostly("in_process", "tensorflow")),
        hierarchy,
        draw(mostly(0, 1, 2, 3)),
        draw(mostly(25 * 2**20, 100, 1, 1000)),
        # A number is for data that do not tell the size of their batches.
        draw(mostly(False, 12, True, times=1.5)),
        draw(mostly(True, False, times=3)),
    )


CALL_LISTS = [
    ("fit",),
    ("fit", "predict"),
    ("fit-validate",),
    ("fit", "evaluate"),
    ("train_on_batch",),
    ("evaluate", "fit"),
    ("predict", "fit", "fit-validate"),
    ("fit", "test_on_batch", "predict_on_batch"),
    ("train_on_batch", "predict"),
]


@st.composite
def programs(draw):
    random = draw(mostly(False, True, times=8))
    kinds = tuple(INPUTS)
    first = draw(branches(random, kinds))
    more = draw(mostly((), (1,), times=4))
    found = (first, *(draw(branches(random)) for _ in more))
    kind = INPUTS[first.kind]
    is_sequence = kind.gives == "sequence" and not kind.is_ragged
    train_step = draw(mostly("keras", *TRAIN_STEPS, times=0.6))
    results = [draw(output(is_sequence and draw(st.booleans())))]
    if draw(mostly(False, True, times=4)):
        results.append(draw(output(is_sequence and draw(st.booleans()))))
    if train_step == "local_mean":
        results = [Output(metrics=results[0].metrics and ("mae",))]
    program = Program(
        branches=found,
        join=draw(st.sampled_from(["concat", "add"])) if more else "concat",
        trunk=tuple(
            draw(
                st.lists(
                    st.sampled_from(layers_that("vector", "vector", random)),
                    max_size=MOST_LAYERS,
                )
            )
        ),
        outputs=tuple(results),
        form=draw(mostly("functional", "subclass", times=2)),
        train_step=train_step,
        optimizer=draw(optimizer()),
        policy=draw(
            mostly("float32", "float64", "mixed_float16", "mixed_bfloat16", times=2)
        ),
        layout=draw(layout()),
        calls=draw(mostly(*CALL_LISTS, times=0.7)),
        callbacks=draw(mostly((), *((name,) for name in CALLBACKS))),
        epochs=draw(mostly(1, 2, 3, times=1)),
        jit=draw(mostly(False, True, times=12)),
        eagerly=draw(mostly(False, True, times=12)),
        steps_per_execution=draw(mostly(1, 2, 3)),
    )
    return sensible(dataclasses.replace(program, data=draw(data(program))))


def sensible(program):
    """The program without what one device refuses or what nothing is said about."""
    changes = {}
    if program.train_step == "local_mean":
        changes["data"] = dataclasses.replace(program.data, weighting="none")
    if program.jit and program.eagerly:
        changes["jit"] = False
    if program.eagerly and program.layout.shard == 3 and program.data.seed:
        program = _with_layout(program, shard=2)  # three in four, as below
    if program.optimizer.name in UNSHARDABLE and program.data.seed:
        # Three in four, so that the refusal is seen but takes little time.
        program = _with_layout(program, shard=0)
    if program.layout.pad_batches is True and program.data.source != "arrays":
        program = _with_layout(program, pad_batches=12)
    if "swap-ema" in program.callbacks and not any(
        "ema" in option for option in program.optimizer.options
    ):
        changes["callbacks"] = ()
    if program.policy != "float32":
        # TensorFlow's in_top_k takes float32 only.
        changes["outputs"] = tuple(
            dataclasses.replace(
                output,
                metrics=_without_top(output.metrics),
                weighted_metrics=_without_top(output.weighted_metrics),
            )
            for output in program.outputs
        )
    if program.optimizer.name == "MultiOptimizer":
        # Keras gives its parts their rates, and it has none.
        left = [o for o in program.optimizer.options if o != "schedule"]
        of_parts = dataclasses.replace(program.optimizer, options=tuple(left))
        changes["optimizer"] = of_parts
    elif "schedule" in program.optimizer.options:
        # Callbacks cannot set the rate of a schedule.
        left = [c for c in program.callbacks if c not in ("plateau", "scheduler")]
        changes["callbacks"] = tuple(left)
    if "subclass" == program.form and program.train_step == "two_optimizers":
        changes["form"] = "functional"
    return dataclasses.replace(program, **changes)


def _without_top(names):
    return tuple(name for name in names if "top" not in name)


def _with_layout(program, **changes):
    layout = dataclasses.replace(program.layout, **changes)
    return dataclasses.replace(program, layout=layout)
