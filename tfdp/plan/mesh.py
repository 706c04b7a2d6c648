"""A mesh of replicas with named axes, and tensors that its axes cut. Pure.

Each replica has rows of its own on every mesh; an axis says which replicas share the
parts of a tensor. Ranks are data-major: the batch axis is the slowest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.shards import JoinedShards, ShardLayout
from tfdp.plan.topology import Groups

#: For each dimension of a tensor the axis that cuts it; None: none does.
Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Replicas in a grid, one for each combination of places on its axes.

    Args:
      sizes: the replicas along each axis, at least 1.
      names: the axes' names, all different.
      batch: the axis of data: the groups along all others share parts of weights.

    Raises:
      ConfigurationError: for a size or a name that cannot be.

    >>> mesh = Mesh((2, 2), ("data", "model"), "data")
    >>> mesh.groups(["model"]), mesh.groups(["data"])
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    batch: str

    def __post_init__(self) -> None:
        sizes, names = tuple(self.sizes), tuple(self.names)
        is_named = len(names) == len(set(names)) == len(sizes)
        if not all(is_whole(size, least=1) for size in sizes) or not is_named:
            raise ConfigurationError(
                "A mesh needs axes with different names, each of at least 1 replica. "
                f"Received: sizes {sizes}, names {names}."
            )
        if self.batch not in names:
            raise ConfigurationError(
                f"The mesh has no axis {self.batch!r} for the rows of a batch. Its "
                f"axes: {', '.join(names)}."
            )
        # The batch axis first: then a rank is a place in the mesh in C order.
        first = names.index(self.batch)
        order = [first, *(i for i in range(len(names)) if i != first)]
        object.__setattr__(self, "sizes", tuple(int(sizes[i]) for i in order))
        object.__setattr__(self, "names", tuple(names[i] for i in order))

    def __str__(self) -> str:
        pairs = zip(self.names, self.sizes, strict=True)
        return " x ".join(f"{name}={size}" for name, size in pairs)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return math.prod(self.sizes)

    @property
    def replicas_per_row_group(self) -> int:
        """The replicas of one place on the batch axis."""
        return self.replicas // self.size(self.batch)

    def size(self, axis: str) -> int:
        """The replicas along `axis`."""
        return self.sizes[self.names.index(axis)]

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a strategy has one mesh)
    def _groups(self, axes: frozenset[str]) -> Groups:
        places = itertools.product(*map(range, self.sizes))
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            pairs = zip(self.names, place, strict=True)
            key = tuple(at for name, at in pairs if name not in axes)
            groups.setdefault(key, []).append(rank)
        return Groups(groups.values())

    def groups(self, axes: Iterable[str]) -> Groups:
        """The replicas that differ in their places on `axes` only."""
        return self._groups(frozenset(axes))

    def axes_that_cut(self, shape: Sequence[int], axes: Axes) -> Axes:
        """`axes` for each dimension of `shape`, without those that do not divide it.

        >>> mesh = Mesh((2, 4), ("data", "model"), "data")
        >>> mesh.axes_that_cut((8, 6), ("data", "model"))
        ('data', None)
        """
        of_all = (*axes, *[None] * (len(shape) - len(axes)))
        return tuple(
            axis if axis and self.size(axis) > 1 and n % self.size(axis) == 0 else None
            for n, axis in zip(shape, of_all, strict=True)
        )

    def layout(self, shape: Sequence[int], axes: Axes) -> MeshLayout | None:
        """How `axes` cut a tensor of `shape`; None: it stays whole."""
        cut = self.axes_that_cut(shape, axes)
        parts = math.prod(self.size(axis) for axis in cut if axis)
        return MeshLayout(tuple(shape), parts, self, cut) if parts > 1 else None


@dataclasses.dataclass(frozen=True)
class MeshLayout(ShardLayout):
    """A tensor in equal blocks: axes of a mesh cut some of its dimensions.

    A part has its own shape; its elements are those of the whole, in their order.
    `Mesh.layout` makes it.

    >>> mesh = Mesh((1, 2), ("data", "model"), "data")
    >>> layout = mesh.layout((4, 6), (None, "model"))
    >>> layout.parts, layout.shard_shape(1), layout.begin(1)
    (2, (4, 3), (0, 3))
    """

    mesh: Mesh
    axes: Axes
    #: Axes along which replicas hold blocks of different tensors.
    apart: tuple[str, ...] = ()

    @property
    def shard_elements(self) -> int:
        return self.elements // self.parts

    def shard_shape(self, part: int) -> tuple[int, ...]:
        sizes = (self.mesh.size(axis) if axis else 1 for axis in self.axes)
        return tuple(n // p for n, p in zip(self.shape, sizes, strict=True))

    def begin(self, part: int) -> tuple[int, ...]:
        """The place of the first element of `part` in the whole tensor."""
        place: dict[str | None, int] = {None: 0}
        for axis in reversed(self._cutting):
            part, place[axis] = divmod(part, self.mesh.size(axis))
        shape = self.shard_shape(part)
        return tuple(place[axis] * n for axis, n in zip(self.axes, shape, strict=True))

    @property
    def groups(self) -> Groups:
        return self.mesh.groups(self._cutting)

    @property
    def copies(self) -> Groups:
        """The replicas that hold the same part."""
        return self.mesh.groups({*self.mesh.names} - {*self._cutting, *self.apart})

    def block_along(self, axis: str) -> MeshLayout:
        """The block at each place on `axis`, as a tensor that the other axes cut.

        >>> mesh = Mesh((2, 2), ("data", "model"), "data")
        >>> block = mesh.layout((4, 6), ("data", "model")).block_along("model")
        >>> block.shape, block.axes, block.parts
        ((4, 3), ('data', None), 2)
        """
        size, at = self.mesh.size(axis), self.axes.index(axis)
        shape = tuple(n // size if i == at else n for i, n in enumerate(self.shape))
        axes = tuple(None if i == at else one for i, one in enumerate(self.axes))
        parts = self.parts // size
        return MeshLayout(shape, parts, self.mesh, axes, (*self.apart, axis))

    @property
    def flat(self) -> ShardLayout:
        return JoinedShards((self.elements,), self.parts, self.shard_elements)

    @property
    def blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A shape, and the order of its dimensions that puts each part in one piece.

        >>> mesh = Mesh((1, 2), ("data", "model"), "data")
        >>> mesh.layout((4, 6), (None, "model")).blocks
        ((4, 2, 3), (1, 0, 2))
        """
        shape: list[int] = []
        at: dict[str, int] = {}
        rest: list[int] = []
        for n, axis in zip(self.shape, self.axes, strict=True):
            if axis:
                at[axis] = len(shape)
                shape.append(self.mesh.size(axis))
                n //= self.mesh.size(axis)
            rest.append(len(shape))
            shape.append(n)
        return tuple(shape), (*(at[axis] for axis in self._cutting), *rest)

    def of_hosts(self, replicas_per_host: int) -> ShardLayout:
        # The replicas of one host hold all parts.
        return ShardLayout(self.shape, 1)

    @property
    def _cutting(self) -> tuple[str, ...]:
        """The axes that cut a dimension, in the order of the mesh."""
        return tuple(name for name in self.mesh.names if name in self.axes)
