"""The generator of programs: its verdicts on single programs, good and with a fault."""

import dataclasses

import numpy as np
import pytest

from tests.generator import compare
from tests.generator.compare import Verdict, _compared, judge
from tests.generator.known import is_documented, is_known
from tests.generator.planted import FAULTS
from tests.generator.program import (
    Branch,
    Data,
    Layout,
    Optimizer,
    Output,
    Program,
)
from tests.generator.reduce import changes_of, reduce, with_changes

UNEVEN = Program(data=Data((8, 3)), layout=Layout(3))


def test_a_program_prints_what_makes_it_again():
    program = Program(
        branches=(Branch("words", ("gru",)), Branch()),
        outputs=(Output("Huber", metrics=("mae",)),),
        optimizer=Optimizer("Adam", ("clipnorm",)),
    )
    assert eval(repr(program)) == program
    assert repr(UNEVEN) == (
        "Program(data=Data(batches=(8, 3)), layout=Layout(replicas=3))"
    )


def test_a_program_that_is_right():
    assert judge(UNEVEN) == Verdict("same")


@pytest.mark.parametrize("fault", ["equal_shares", "a_replica_dropped", "not_a_number"])
def test_a_planted_fault(fault, monkeypatch):
    from tfdp.exchange import send_receive
    from tfdp.tracing.step import Step

    monkeypatch.setattr(Step, "share_of", Step.share_of)
    monkeypatch.setattr(send_receive, "sum_in_order", send_receive.sum_in_order)
    FAULTS[fault]()
    verdict = judge(UNEVEN)
    assert verdict.kind == "differs"
    assert "weight" in verdict.signature


def test_a_small_fault_is_no_rounding(monkeypatch):
    """One that is as large with more digits."""
    whole = compare.run_replicas

    def off(program, make_strategy):
        found, exact, unequal = whole(program, make_strategy)
        kernels = (key for key in found if key.startswith("weight") and "kernel" in key)
        name = next(kernels)
        return found | {name: found[name] * (1 + 3e-5)}, exact, unequal

    monkeypatch.setattr(compare, "run_replicas", off)
    verdict = judge(UNEVEN)
    assert verdict.kind == "differs"
    assert verdict.excess < compare.SMALL_EXCESS


def test_a_program_that_one_device_refuses():
    two_predictions = Program(outputs=(Output("Dice"),))  # wants time steps
    assert judge(two_predictions).kind == "skipped"


# What the generator has found, as it has made it smaller.
FOUND = {
    # A function with another name, and a replica without rows.
    "step-of-another-name": Program(train_step="logged_loss", data=Data((1,))),
    # Keras built the compiled optimizer for the variables of both.
    "two-optimizers": Program(
        train_step="two_optimizers",
        optimizer=Optimizer("Adam", ("ema",)),
        data=Data((8, 3)),
    ),
    # Shards of as many elements as the last axis: `ops.add` took one for a bias.
    "state-as-a-matrix": Program(
        branches=(Branch("word"),),
        optimizer=Optimizer("Ftrl"),
        data=Data((8,)),
        layout=Layout(4, shard=1),
    ),
    # The end of a dataset without a length: counters of replicas were apart.
    "end-of-input": Program(
        outputs=(Output(), Output()),
        optimizer=Optimizer(options=("decay",)),
        data=Data((8, 5), "dataset"),
        layout=Layout(pad_batches=12),
    ),
    # Replicas that run eagerly take turns in the middle of a step: one counted the rows
    # of another.
    "eager-and-filled-up": Program(
        data=Data((8,), "dataset"), layout=Layout(pad_batches=12), eagerly=True
    ),
    # What a replica without rows computed of a borrowed one was summed.
    "eager-statistics-without-rows": Program(
        trunk=("sync-batch-norm",),
        data=Data((4,)),
        layout=Layout(replicas=3),
        eagerly=True,
    ),
    # Two inputs of a batch that was filled up: an input and its target.
    "predict-of-two-inputs": Program(
        branches=(Branch(), Branch()),
        data=Data((8, 6)),
        layout=Layout(pad_batches=True),
        calls=("predict",),
    ),
    # Keras asks nobody when it takes a sum: a metric of one's own took it for a mean.
    "reported-sum": Program(
        outputs=(Output(reduction="sum"),), train_step="logged_loss", data=Data((8,))
    ),
    "reported-sum-and-mean": Program(
        outputs=(Output(reduction="sum"), Output()),
        train_step="logged_loss",
        data=Data((8, 3)),
        layout=Layout(3),
    ),
    "eager-reported-sum": Program(
        outputs=(Output(reduction="sum"),),
        train_step="logged_loss",
        data=Data((8, 5)),
        eagerly=True,
    ),
    # The reference added the rows of a word first, as shards do: one replica has none.
    "one-replica-has-no-shards": Program(
        branches=(Branch("word"),),
        optimizer=Optimizer("RMSprop"),
        data=Data((8,)),
        layout=Layout(replicas=1, shard=2),
    ),
    # A metric of one's own was given the rows that fill a batch up, too.
    "own-metric-of-rows": Program(
        outputs=(Output(reduction="none"),),
        train_step="logged_loss",
        data=Data((1,)),
        layout=Layout(pad_batches=12),
    ),
    # Of a product of two factors eager mode told neither.
    "eager-sum-of-sums": Program(
        trunk=("dense", "add-loss-sum"),
        outputs=(Output(reduction="sum"),),
        train_step="logged_loss",
        data=Data((8, 2)),
        layout=Layout(3),
        eagerly=True,
    ),
    # Whole numbers, too, that Keras' loss scaler does not note under a strategy.
    "not-noted": Program(
        optimizer=Optimizer("Adafactor", wrapper="loss_scale"), data=Data((8,))
    ),
    # A rounding, 2.2 times what the twins met: in float64 1e-17 is left of it.
    "rounding-only": Program(
        branches=(Branch("masked-words", ("attention", "flatten")),),
        optimizer=Optimizer("Ftrl"),
        layout=Layout(shard=2),
        eagerly=True,
    ),
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_what_was_found_is_mended(program):
    assert judge(program) == Verdict("same")


MIXED = Program(outputs=(Output(), Output(reduction="none")), data=Data((8,)))
# A sum asks nobody how many replicas there are.
WITH_SUM = Program(
    outputs=(Output(reduction="sum"), Output(reduction="none")), data=Data((8,))
)


# A step of one's own asks for the loss, and reports none.
OWN_STEP = dataclasses.replace(MIXED, train_step="apply_gradients")


@pytest.mark.parametrize(
    "refused",
    [
        Program(optimizer=Optimizer("Lamb"), layout=Layout(shard=1)),
        MIXED,
        WITH_SUM,
        OWN_STEP,
    ],
    ids=["optimizer", "reductions", "sum-and-rows", "rows-in-own-step"],
)
def test_a_refusal_is_documented_for_some_programs_only(refused):
    verdict = judge(refused)
    assert verdict.kind == "refused"
    assert is_documented(refused, verdict.text)
    assert not is_documented(Program(layout=Layout(shard=1)), verdict.text)


NAN = float("nan")


@pytest.mark.parametrize(
    "expected, got, kind",
    [
        ([1.0, 2.0], [1.0, 2.0], "same"),
        ([1.0, 2.0], [1.0, 2.05], "same"),
        ([1.0, 2.0], [1.0, 2.2], "differs"),
        ([1.0, 2.0], [NAN, 2.0], "differs"),
        ([1.0, NAN], [1.0, 2.0], "differs"),
        ([1.0, NAN], [1.0, NAN], "same"),
        ([np.inf], [np.inf], "same"),
        ([np.inf], [-np.inf], "differs"),
        ([1.0], [1.0, 1.0], "differs"),
    ],
)
def test_what_counts_as_a_difference(expected, got, kind):
    expected, got = {"a": np.array(expected)}, {"a": np.array(got)}
    assert _compared(expected, {}, got, {}, {"a": 0.1}).kind == kind


def test_counters_must_agree_exactly():
    assert _compared({}, {"n": np.array(2)}, {}, {"n": np.array(2)}, {}).kind == "same"
    verdict = _compared({}, {"n": np.array(2)}, {}, {"n": np.array(1)}, {})
    assert verdict.kind == "differs"


def test_known_faults_can_be_switched_on():
    from tests.generator.known import KNOWN

    logged = Program(train_step="logged_loss")
    for name, meets in KNOWN.items():
        if meets(logged):
            assert is_known(logged) and not is_known(logged, switched_on=(name,))
    assert not is_known(Program())


def test_a_program_is_made_smaller():
    large = Program(
        branches=(Branch("words", ("conv1d", "gru")), Branch()),
        trunk=("dense", "layer-norm", "gate"),
        outputs=(Output("Huber", metrics=("mae",)), Output()),
        optimizer=Optimizer("Adam", ("clipnorm", "ema")),
        layout=Layout(3, shard=2),
        epochs=3,
    )
    asked = []

    def differs(program):
        asked.append(program)
        return "layer-norm" in program.trunk and "ema" in program.optimizer.options

    smallest = reduce(large, differs)
    assert smallest == Program(
        trunk=("layer-norm",),
        optimizer=Optimizer(options=("ema",)),
        data=Data((8,)),
    )
    assert len(asked) < 30
    assert with_changes(changes_of(large)) == large
