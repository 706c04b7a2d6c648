"""Imports point down: the layers of the package, held by a test.

   10 tools      beside the core, up to 16: plans, reports, comparisons, the commands
    9 entry      `tfdp launch`
    8 face       the public names
    7 user API   strategies, callbacks, optimizers
    6 step       a replica's step, the distributed optimizer; files of a model
    5 chain      one sum of gradients, and the features that take part; shards
    4 parts      variables, layers, losses, input
    3 exchange   from gradients to sums; what is known while a step is traced
    2 wire       hosts and their links; every private TensorFlow/Keras name
    1 plans      plans, formulas, the cluster, schedules
    0 ground     errors, files

The layers 0 and 1 but for the schedules, and `hosts`, load no TensorFlow. A new room
gets its row here. Imports inside functions count as well.
"""

import graphlib

import pytest

from tests.support.package_source import imported_names, modules, parse

# First part below `tfdp` -> layer. The package itself (its public names) is "".
LAYERS = {
    "__main__": 16,
    "tools.selftest": 15,
    "tools.commands": 14,
    "tools.measuring": 13,
    "tools.callbacks": 12,
    "tools.planning": 11,
    "tools.processes": 11,
    "tools.runs": 11,
    "tools.testing": 11,
    "tools.tune": 11,
    "tools": 10,
    "tools.report": 10,
    "tools.simulator": 10,
    "launch": 9,
    "": 8,
    "planning": 8,
    "testing": 8,
    "callbacks": 7,
    "optimizers": 7,
    "ray": 7,
    "strategies": 7,
    "checkpoint": 6,
    "grid": 6,
    "step": 6,
    "chain": 5,
    "sharding": 5,
    "data": 4,
    "layers": 4,
    "losses": 4,
    "variables": 4,
    "exchange": 3,
    "lint": 3,
    "tracing": 3,
    "_private": 2,
    "compression": 2,
    "hosts": 2,
    "seams": 2,
    "cluster": 1,
    "plan": 1,
    "schedules": 1,
    "sync": 1,
    "_version": 0,
    "checks": 0,
    "errors": 0,
    "files": 0,
    "progress_bar": 0,
}
# The core never imports a tool. These hand on public names that tools define, and do
# nothing else: a name of a tool is where users have always found it.
FACES = {"tfdp.callbacks", "tfdp.planning", "tfdp.testing"}
# Rooms that load no framework.
PURE = {
    "checks",
    "_version",
    "cluster",
    "errors",
    "files",
    "hosts",
    "launch",
    "plan",
    "progress_bar",
    "sync",
    "tools.report",
    "tools.runs",
    "tools.simulator",
    "tools.tune",
}
# Of the core, that tools import.
MOST_INNER_MODULES = 36
FRAMEWORKS = {"tensorflow", "keras"}
MODULES = modules()
MODULE_NAMES = {module.name for module in MODULES}


def unit_of(name):
    """The row of LAYERS for a dotted name: tfdp.hosts.ring -> hosts.

    Of tools each has its own row: tfdp.tools.tune.tuning -> tools.tune.
    """
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["tools"] else 1])


def imported_modules(module):
    """(line, name) of the tfdp modules that a module imports.

    `from tfdp.errors import DataError` is an import of tfdp.errors, and
    `from tfdp import strategies` one of tfdp.strategies.
    """
    found = []
    for line, name in imported_names(module):
        if name.split(".")[0] != "tfdp":
            continue
        while name not in MODULE_NAMES:
            name = name.rpartition(".")[0]
        found.append((line, name))
    return found


def is_face_of(module, name):
    return module.name in FACES and name.startswith("tfdp.tools.")


def violations(module):
    own_layer = LAYERS[unit_of(module.name)]
    found = [
        f"{module.path}:{line} (layer {own_layer}) imports {name} "
        f"(layer {LAYERS[unit_of(name)]})"
        for line, name in imported_modules(module)
        if LAYERS[unit_of(name)] > own_layer and not is_face_of(module, name)
    ]
    if unit_of(module.name) in PURE:
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


def test_the_package_imports_no_benchmark_script():
    importing = {
        module.name
        for module in MODULES
        for _, name in imported_names(module)
        if name.split(".")[0] == "benchmarks"
    }
    assert importing == set()


def test_the_core_imports_no_tool():
    importing = {
        module.name
        for module in MODULES
        if not unit_of(module.name).startswith(("tools", "__main__"))
        for _, name in imported_modules(module)
        if unit_of(name).startswith("tools")
    }
    assert importing <= FACES


def test_tools_reach_no_more_of_the_core():
    """Public names, `plan` and the ground aside. The number may only become smaller,
    unless a command shows something new of the core."""
    grounds = {unit for unit, layer in LAYERS.items() if not layer} | {"plan", ""}
    inner = {
        name
        for module in MODULES
        if unit_of(module.name).startswith("tools")
        for _, name in imported_modules(module)
        if not unit_of(name).startswith("tools")
        and unit_of(name) not in grounds
        and name.count(".") > 1
    }
    assert len(inner) == MOST_INNER_MODULES


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
        ("tfdp.errors", "from tfdp import strategies"),
        ("tfdp.errors", "def late():\n    import tensorflow as tf"),
        ("tfdp.plan.topology", "from keras import ops"),
        ("tfdp.exchange.reducer", "from ..strategies.data_parallel import X"),
        (
            "tfdp.strategies.data_parallel",
            "def late():\n    from tfdp.tools.commands.cli import main",
        ),
    ],
)
def test_the_rule_sees_an_import_that_points_up(name, source):
    assert len(violations(parse(source, name))) == 1
