"""Imports point down: the layers of the package, held by a test.

    5 entry      what a person starts: the command line, benchmarks
    4 user API   strategies, data, callbacks
    3 training   optimizers, schedules
    2 gradients  buckets in flight
    1 wire       engines that move tensors; every private TensorFlow/Keras name
    0 pure       plans, formulas, errors: no TensorFlow

A new module or folder gets its row here. Imports inside functions count as well.
"""

import graphlib

import pytest

from tests.support.package_source import imported_names, modules, parse

# First part below `tfdp` -> layer. The package itself (its public names) is "".
LAYERS = {
    "__main__": 5,
    "bench": 5,
    "check": 5,
    "cli": 5,
    "info": 5,
    "launch": 5,
    "merge_command": 5,
    "quiet_import": 5,
    "report": 5,
    "": 4,
    "auto": 4,
    "callbacks": 4,
    "cluster_resolver": 4,
    "data": 4,
    "devices": 4,
    "hierarchical": 4,
    "multi_host": 4,
    "replica_strategy": 4,
    "strategy": 4,
    "testing": 4,
    "tpu": 4,
    "tpu_system": 4,
    "worker_settings": 4,
    "checkpoint": 3,
    "layers": 3,
    "losses": 3,
    "optimizer": 3,
    "rematerialization": 3,
    "optimizers": 3,
    "schedules": 3,
    "gradients": 2,
    "_tf": 1,
    "hosts": 1,
    "collectives": 1,
    "_version": 0,
    "atomic_files": 0,
    "buckets": 0,
    "checked_json": 0,
    "cluster": 0,
    "communication": 0,
    "errors": 0,
    "keras_backend": 0,
    "machine": 0,
    "schedule_formulas": 0,
    "shards": 0,
    "topology": 0,
}
FRAMEWORKS = {"tensorflow", "keras"}
MODULES = modules()
MODULE_NAMES = {module.name for module in MODULES}


def unit_of(name):
    """The row of LAYERS for a dotted name: tfdp.collectives.ring -> collectives."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported_modules(module):
    """(line, name) of the tfdp modules that a module imports.

    `from tfdp.errors import DataError` is an import of tfdp.errors, and
    `from tfdp import strategy` one of tfdp.strategies.data_parallel.
    """
    found = []
    for line, name in imported_names(module):
        if name.split(".")[0] != "tfdp":
            continue
        while name not in MODULE_NAMES:
            name = name.rpartition(".")[0]
        found.append((line, name))
    return found


def violations(module):
    own_layer = LAYERS[unit_of(module.name)]
    found = [
        f"{module.path}:{line} (layer {own_layer}) imports {name} "
        f"(layer {LAYERS[unit_of(name)]})"
        for line, name in imported_modules(module)
        if LAYERS[unit_of(name)] > own_layer
    ]
    if own_layer == 0:
        found += [
            f"{module.path}:{line} is pure, but imports {name}"
            for line, name in imported_names(module)
            if name.split(".")[0] in FRAMEWORKS
        ]
    return found


def test_every_module_has_a_layer():
    assert {unit_of(module.name) for module in MODULES} <= set(LAYERS)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_imports_point_down(module):
    assert violations(module) == []


def test_imports_have_no_cycle():
    graph = {
        module.name: {
            name
            for _, name in imported_modules(module)
            # Every import runs the package's __init__, which resolves its names late.
            if name not in ("tfdp", module.name)
        }
        for module in MODULES
        if module.name != "tfdp"
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) >= set(graph)


@pytest.mark.parametrize(
    "name, source",
    [
        (
            "tfdp.errors",
            "from tfdp.strategies.data_parallel import DataParallelStrategy",
        ),
        ("tfdp.errors", "from tfdp import strategy"),
        ("tfdp.errors", "def late():\n    import tensorflow as tf"),
        ("tfdp.plan.topology", "from keras import ops"),
        ("tfdp.exchange.pipeline", "from ..strategy import DataParallelStrategy"),
        (
            "tfdp.strategies.data_parallel",
            "def late():\n    from tfdp.commands.cli import main",
        ),
    ],
)
def test_the_rule_sees_an_import_that_points_up(name, source):
    assert len(violations(parse(source, name))) == 1
