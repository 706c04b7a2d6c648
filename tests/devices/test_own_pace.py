"""Parts of weights that hosts own and update at their own pace; what is refused."""

import keras
import numpy as np
import pytest

import tfdp
from tests.support.apart import linear_model
from tests.support.parity import make_strategy
from tfdp.errors import ConfigurationError
from tfdp.hosts.pushes import Layouts, Push
from tfdp.step.owned_parts import OwnedParts

SHAPES = [(7, 3), (5,), (1,)]
HOSTS = 3
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "averages": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_overwrite_frequency=3
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
}


def variables_and_gradients(steps):
    rng = np.random.default_rng(7)
    start = [rng.normal(size=shape).astype("float32") for shape in SHAPES]
    variables = [keras.Variable(value, name=f"w{i}") for i, value in enumerate(start)]
    gradients = [
        [rng.normal(size=shape).astype("float32") for shape in SHAPES]
        for _ in range(steps)
    ]
    return variables, gradients


def parts_of(optimizer, variables):
    layouts = Layouts(SHAPES, HOSTS)
    owners = [OwnedParts(optimizer, variables, layouts, r) for r in range(HOSTS)]
    for owner in owners:
        owner.load()
    return layouts, owners


def pushed(layouts, owners, gradients, rate, late=0):
    for rank, owner in enumerate(owners):
        parts = {
            place: layouts.part_of(gradient, place, rank)
            for place, gradient in enumerate(gradients)
        }
        owner.apply(Push(0, owner.version - late, rate, parts))


def given_back(layouts, owners):
    """Joins the parts, in the order in which each owner gives them back."""
    given = [[] for _ in owners]
    for rank, owner in enumerate(owners[1:], 1):
        owner.give_back(
            lambda part, layout, rank=rank: (
                given[rank].append(part) or np.zeros(layout.elements, part.dtype)
            ),
            owner.numbers(),
        )
    others = iter(zip(*given[1:], strict=True))

    def join(part, layout):
        return np.concatenate([part, *next(others)])

    owners[0].give_back(join, owners[0].numbers())


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_are_updated_as_the_whole(name):
    """Two steps whole, then two pushes without staleness, a rate, and state given back.

    An update of an element is the same expression: single roundings may differ where
    lengths have another remainder, four steps of 0.1 at most.
    """
    variables, gradients = variables_and_gradients(4)
    optimizer, rate = OPTIMIZERS[name](), 0.02
    optimizer.exclude_from_weight_decay(var_list=[variables[1]])
    for gradient in gradients[:2]:
        optimizer.apply([keras.ops.array(g) for g in gradient], variables)
    layouts, owners = parts_of(optimizer, variables)
    for gradient in gradients[2:]:
        pushed(layouts, owners, gradient, rate)
    alone, _ = variables_and_gradients(4)
    reference = OPTIMIZERS[name]()
    reference.exclude_from_weight_decay(var_list=[alone[1]])
    for step, gradient in enumerate(gradients):
        if step == 2:
            reference.learning_rate = rate
        reference.apply([keras.ops.array(g) for g in gradient], alone)
    given_back(layouts, owners)
    for ours, theirs in zip(
        [*variables, *optimizer.variables], [*alone, *reference.variables], strict=True
    ):
        if theirs.name != "learning_rate":
            np.testing.assert_allclose(ours, theirs, rtol=4e-6, atol=4e-7)
    assert {owner.version for owner in owners} == {4}


def test_a_stale_push_has_a_smaller_rate():
    variables, gradients = variables_and_gradients(4)
    start = [variable.numpy() for variable in variables]
    layouts, owners = parts_of_sgd(variables)
    late = [0, 1, 2, 0]
    for gradient, staleness in zip(gradients, late, strict=True):
        pushed(layouts, owners, gradient, 0.5, late=staleness)
    for owner in owners:
        assert owner.staleness == {0: 2, 1: 1, 2: 1}
    joined = [
        np.concatenate(parts)
        for parts in zip(*(o.weights() for o in owners), strict=True)
    ]
    for place, whole in enumerate(joined):
        expected = start[place].copy()
        for gradient, staleness in zip(gradients, late, strict=True):
            expected -= np.float32(0.5 / max(1, staleness)) * gradient[place]
        # Four roundings of numbers below 8.
        np.testing.assert_allclose(whole, expected.reshape(-1), rtol=0, atol=2e-6)


def parts_of_sgd(variables):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)
    return parts_of(optimizer, variables)


class Whole(keras.optimizers.SGD):
    """Its update may need whole weights."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(
            gradient / keras.ops.norm(gradient), variable, learning_rate
        )


class Elementwise(keras.optimizers.SGD):
    is_elementwise = True

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)


def wrapped(inner, **options):
    return tfdp.DistributedOptimizer(inner, sync=tfdp.sync.Asynchronous(), **options)


REFUSED = {
    "lamb": (lambda: wrapped(keras.optimizers.Lamb()), "Lamb may need whole weights"),
    "muon": (lambda: wrapped(keras.optimizers.Muon()), "Muon may need whole weights"),
    "adafactor": (lambda: wrapped(keras.optimizers.Adafactor()), "Adafactor may need"),
    "lars": (lambda: wrapped(tfdp.optimizers.LARS()), "LARS may need whole weights"),
    "own": (lambda: wrapped(Whole()), "is_elementwise = True"),
    "accumulates": (
        lambda: wrapped(keras.optimizers.SGD(), accumulate_steps=2),
        "accumulate_steps=2",
    ),
    "scales": (
        lambda: wrapped(keras.optimizers.SGD(), dynamic_loss_scale=True),
        "dynamic_loss_scale=False",
    ),
}


@pytest.mark.parametrize("make, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_owned_in_parts_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_an_elementwise_optimizer_of_a_program_can_be_owned():
    assert wrapped(Elementwise()).sync == tfdp.sync.Asynchronous()


def test_a_value_survives_its_configuration():
    optimizer = wrapped(keras.optimizers.SGD())
    again = tfdp.DistributedOptimizer.from_config(optimizer.get_config())
    assert again.sync == tfdp.sync.Asynchronous()
    assert again.staleness_counts == {}


@pytest.mark.parametrize("options", [{}, {"hierarchy": (2, 2)}], ids=["one", "made up"])
def test_one_host_cannot_push(options):
    with make_strategy(4, **options).scope():
        model = linear_model()
        optimizer = wrapped(keras.optimizers.SGD())
        with pytest.raises(ConfigurationError, match="needs several hosts"):
            optimizer.build(model.trainable_variables)
