"""Classes outside `tfdp/_private` touch no private name but the hooks listed there.

The source alone does not tell whether `self._x` is tfdp's own name or that of a Keras
or TensorFlow base class; the loaded classes do.
"""

import ast
import importlib
import inspect
import textwrap

import keras
import pytest

from tests.support.package_source import modules
from tfdp._private.hooks import HOOKS

FRAMEWORKS = ("tensorflow", "keras")


def classes_with_a_framework_base():
    found = {}
    for module in modules():
        if module.name.startswith("tfdp._private") or module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and value.__module__ == module.name:
                if framework_bases(value):
                    found[f"{module.name}.{value.__name__}"] = value
    return found


def is_framework(cls):
    return cls.__module__.split(".")[0] in FRAMEWORKS


def framework_bases(cls):
    return [base for base in cls.__mro__ if is_framework(base)]


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def self_attributes(cls, context):
    """The underscore names that a class loads from, or stores on, `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
        and is_private(node.attr)
    }


def private_framework_names(cls):
    """The privates of its framework bases that a class overrides, sets or reads."""
    from_framework = {name for base in framework_bases(cls) for name in vars(base)}
    defined = {name for name in vars(cls) if is_private(name)}
    stored = self_attributes(cls, ast.Store)
    inherited_from_tfdp = set()
    for base in cls.__mro__[1:]:
        if base.__module__.split(".")[0] == "tfdp":
            inherited_from_tfdp |= vars(base).keys() | self_attributes(base, ast.Store)
    foreign = self_attributes(cls, ast.Load) - defined - stored - inherited_from_tfdp
    # Python's own, of every abstract base class.
    return (((defined | stored) & from_framework) | foreign) - {"_abc_impl"}


CLASSES = classes_with_a_framework_base()


@pytest.mark.parametrize("name", CLASSES)
def test_no_private_framework_name_but_hooks(name):
    assert private_framework_names(CLASSES[name]) - HOOKS.keys() == set()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_overridden_and_still_one_of_its_base(hook):
    """A method by that name that no base class has would never run."""
    overriding = [
        (name, part)
        for name, cls in CLASSES.items()
        for part in cls.__mro__
        if part.__module__.startswith("tfdp.") and hook in vars(part)
    ]
    reading = [
        cls for cls in CLASSES.values() if hook in self_attributes(cls, ast.Load)
    ]
    assert overriding or reading
    for name, _ in overriding:
        assert any(hook in vars(base) for base in framework_bases(CLASSES[name])), name


class Overrides(keras.layers.Layer):
    def _get_own_losses(self):
        return []


class Reads(keras.layers.Layer):
    def call(self, inputs):
        return inputs if self._losses else None


class OwnNames(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self._of_tfdp = 1

    def call(self, inputs):
        return inputs * self._of_tfdp


@pytest.mark.parametrize(
    "cls, names",
    [(Overrides, {"_get_own_losses"}), (Reads, {"_losses"}), (OwnNames, set())],
)
def test_the_rule_sees_a_private_name(cls, names):
    assert private_framework_names(cls) == names
