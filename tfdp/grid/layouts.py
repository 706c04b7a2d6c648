"""The mesh that `layout=` gives, and for each weight the axes that cut it.

Keras' own objects decide which rule meets which weight.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdp._private.keras_calls import variable_of_caller
from tfdp._private.keras_layers import layout_map_of
from tfdp.errors import ConfigurationError, LayoutWarning
from tfdp.plan.mesh import Axes, Mesh, MeshLayout
from tfdp.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class WeightLayouts:
    """The mesh of a strategy, and the layouts of its weights.

    Args:
      mesh: its replicas.
      distribution: Keras' object, which knows the rules.
      is_on_hosts: whether several hosts share the batch axis.
    """

    mesh: Mesh
    distribution: keras.distribution.ModelParallel
    is_on_hosts: bool = False
    #: The rules that have met a weight.
    met: set[str] = dataclasses.field(default_factory=set, compare=False)

    def axes_of(self, variable: keras.Variable) -> Axes:
        """The axes that a rule gives each dimension of `variable`; () without a rule.

        Raises `ConfigurationError` for a rule that cannot be of this weight.
        """
        path, rank = variable.path, len(variable.shape)
        try:
            found = self.distribution.get_variable_layout(variable)
        except ValueError as error:  # two rules
            raise ConfigurationError(
                f"Two rules of layout= meet the weight {path!r}: {error} Change one."
            ) from error
        axes: Axes = tuple(getattr(found, "axes", found))
        rules = layout_map_of(self.distribution)
        self.met.update(rule for rule in rules if rules[rule] is found)
        cutting = [axis for axis in axes if axis is not None]
        if len(axes) > rank:
            raise ConfigurationError(
                f"A rule of layout= has {len(axes)} axes, {axes}, for the weight "
                f"{path!r} of shape {tuple(variable.shape)}. Give one for each "
                "dimension, None where it stays whole."
            )
        unknown = [axis for axis in cutting if axis not in self.mesh.names]
        if unknown or len(set(cutting)) < len(cutting):
            what = f"no axis {unknown[0]!r}" if unknown else "each axis once"
            raise ConfigurationError(
                f"A rule of layout= gives the weight {path!r} the axes {axes}, and the "
                f"mesh has {what}. Its axes: {', '.join(self.mesh.names)}."
            )
        return axes

    def warn_of_idle_rules(self, path: str) -> None:
        """Warns of rules that have met no weight; `path`: that of one."""
        idle = [
            repr(rule)
            for rule in layout_map_of(self.distribution)
            if rule not in self.met and not rule.endswith("output")  # of no weight
        ]
        if idle:
            warnings.warn(
                f"These rules of layout= meet no weight: {', '.join(idle)}. A rule is "
                f"a pattern of the whole path, such as {path!r}: begin it with '.*'. "
                "tfdp plan SCRIPT --layout shows what each rule meets.",
                LayoutWarning,
                stacklevel=2,
            )

    def layout_of(self, variable: keras.Variable) -> MeshLayout | None:
        """How `variable` rests in parts; None: it stays whole."""
        layout = self.mesh.layout(tuple(variable.shape), self.axes_of(variable))
        if layout is not None and self.is_on_hosts and self.mesh.batch in layout.axes:
            raise ConfigurationError(
                f"A rule of layout= cuts the weight {variable.path!r} along "
                f"{self.mesh.batch!r}, the axis of data, which crosses hosts, and each "
                "host needs all parts of a weight. Cut it along another axis, or use "
                'shard="parameters", which shares weights between hosts.'
            )
        return layout

    def layout_of_new(self, kwargs: dict[str, Any]) -> MeshLayout | None:
        """`layout_of` the weight that Keras is creating; None: it stays whole.

        Variables that are not trained stay whole: each replica updates its own
        statistics from its own rows.
        """
        variable = variable_of_caller()
        if variable is None or kwargs.get("trainable") is False:
            return None
        if kwargs.get("colocate_with") is not None or not len(variable.shape):
            return None
        return self.layout_of(variable)


def layouts_of(given: Any, topology: Topology) -> WeightLayouts:
    """The mesh and the rules of `layout=` for the replicas of `topology`.

    Raises `ConfigurationError` for a mesh of another number of replicas, or one with
    groups that cross hosts.
    """
    distribution = distribution_of(given)
    mesh = mesh_of(distribution)
    if mesh.replicas != topology.num_replicas:
        raise ConfigurationError(
            f"The mesh of layout= has {mesh.replicas} devices ({mesh}), and the "
            f"strategy has {topology.num_replicas} ({topology}). Give both the same: "
            f"keras.distribution.DeviceMesh({_fitting(mesh, topology)}, ...), or other "
            "devices to the strategy."
        )
    own = mesh.replicas_per_row_group
    if topology.devices_per_host % own:
        raise ConfigurationError(
            f"In the mesh {mesh} of layout= {own} replicas share parts of weights, and "
            f"a host has {topology.devices_per_host}: they would exchange them over "
            "the network in each layer. Keep them inside a host: "
            f"keras.distribution.DeviceMesh({_fitting(mesh, topology)}, ...)."
        )
    return WeightLayouts(mesh, distribution, topology.hosts > 1)


def _fitting(mesh: Mesh, topology: Topology) -> tuple[int, int]:
    """The shape of a mesh for `topology`, as near to `mesh` as can be."""
    own = math.gcd(mesh.replicas_per_row_group, topology.devices_per_host)
    return topology.num_replicas // own, own


def distribution_of(given: Any) -> keras.distribution.ModelParallel:
    """The `ModelParallel` of `layout=`, which may be a `LayoutMap`."""
    if isinstance(given, keras.distribution.ModelParallel):
        return given
    return keras.distribution.ModelParallel(layout_map=given)


def mesh_of(distribution: keras.distribution.ModelParallel) -> Mesh:
    """The mesh of Keras' distribution; its batch axis is that of data."""
    of_keras = distribution.device_mesh
    names = tuple(map(str, of_keras.axis_names))
    return Mesh(tuple(of_keras.shape), names, distribution.batch_dim_name)


def rules_of(distribution: keras.distribution.ModelParallel) -> dict[str, Axes]:
    """The axes of each rule, by its pattern."""
    rules = layout_map_of(distribution)
    return {rule: tuple(rules[rule].axes) for rule in rules}


def rules_for(path: str, rules: Mapping[str, Axes]) -> tuple[str, ...]:
    """The rules that meet the path of a weight, as Keras matches them."""
    if path in rules:
        return (path,)
    found = []
    for rule, axes in rules.items():
        alone = keras.distribution.LayoutMap(None)
        alone[rule] = axes
        found += [rule] if alone[path] is not None else []
    return tuple(found)


def devices_of(given: Any) -> Sequence[str] | None:
    """The names of the mesh's devices, by rank; None: it has other objects."""
    return devices_of_mesh(distribution_of(given))


def devices_of_mesh(distribution: Any) -> list[str] | None:
    """`devices_of` of any distribution of Keras."""
    of_keras = distribution.device_mesh
    first = list(of_keras.axis_names).index(distribution.batch_dim_name)
    order = [first, *(i for i in range(of_keras.devices.ndim) if i != first)]
    devices = list(of_keras.devices.transpose(order).ravel())
    return list(map(str, devices)) if all(map(_is_text, devices)) else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
