"""A Keras program as plain, frozen data: what is drawn, run, compared and printed.

`repr` leaves out what is as by default, so that a small program prints small, and is
Python that makes the program again. Names are those of the tables in `layers.py`,
`outputs.py`, `optimizers.py`, `train_steps.py` and `calls.py`.
"""

import dataclasses


class Plain:
    """Prints only the fields that differ from their defaults."""

    def __repr__(self):
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Branch(Plain):
    """One input, and the layers it goes through until it is one vector per row.

    Args:
      kind: of the input; `layers.INPUTS`.
      layers: names in `layers.LAYERS`, each of which takes what the last one gives.
    """

    kind: str = "vector"
    layers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Output(Plain):
    """One output, its loss and its metrics.

    Args:
      loss: a name in `outputs.LOSSES`.
      reduction: of the loss.
      per_step: whether there is an output for every time step of the first branch.
      loss_weight: of `compile(loss_weights=)`; None leaves it out.
      metrics, weighted_metrics: names in `outputs.METRICS`.
    """

    loss: str = "MeanSquaredError"
    reduction: str = "sum_over_batch_size"
    per_step: bool = False
    loss_weight: float | None = None
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Optimizer(Plain):
    """The optimizer.

    Args:
      name: in `optimizers.OPTIMIZERS`.
      options: names in `optimizers.OPTIONS`.
      wrapper: "none", "distributed" (`tfdp.DistributedOptimizer`) or "loss_scale".
      accumulate_steps: of `DistributedOptimizer`.
    """

    name: str = "SGD"
    options: tuple[str, ...] = ()
    wrapper: str = "none"
    accumulate_steps: int = 1


@dataclasses.dataclass(frozen=True, repr=False)
class Data(Plain):
    """What is trained on.

    Args:
      batches: the rows of each global batch of an epoch; see `sizes`.
      source: "arrays" (all batches but the last are as large as the first), "dataset"
        (batches of any size) or "generator" (the same from a Python generator).
      weighting: "none", "sample_weight", "zero_weights" (some rows weigh nothing) or
        "class_weight".
      validation_rows: of the one batch that "fit-validate" validates with.
      seed: of the numbers.
    """

    batches: tuple[int, ...] = (8, 8)
    source: str = "arrays"
    weighting: str = "none"
    validation_rows: int = 8
    seed: int = 0

    @property
    def sizes(self):
        """The rows of each global batch, as Keras makes them of this source."""
        if self.source != "arrays":
            return self.batches
        whole, rest = divmod(sum(self.batches), self.batches[0])
        return (*[self.batches[0]] * whole, *([rest] if rest else []))


@dataclasses.dataclass(frozen=True, repr=False)
class Layout(Plain):
    """The strategy; see `tfdp.DataParallelStrategy` and `tfdp.Communication`."""

    replicas: int = 2
    engine: str = "in_process"
    hierarchy: object = "flat"
    shard: int = 0
    bucket_bytes: int = 25 * 2**20
    pad_batches: bool | int = False
    draws_per_replica: bool = True


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Plain):
    """A whole program.

    Args:
      branches: the inputs; what comes out of them is joined.
      join: "concat" or "add".
      trunk: layers behind the joint.
      form: "functional" or "subclass" (a model with a `call` of its own).
      train_step: a name in `train_steps.TRAIN_STEPS`.
      policy: the dtype policy.
      calls: names in `calls.CALLS`, done in this order.
      callbacks: names in `calls.CALLBACKS`.
      epochs: of each fit.
      jit, eagerly, steps_per_execution: of compile.
    """

    branches: tuple[Branch, ...] = (Branch(),)
    join: str = "concat"
    trunk: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = (Output(),)
    form: str = "functional"
    train_step: str = "keras"
    optimizer: Optimizer = Optimizer()
    policy: str = "float32"
    data: Data = Data()
    layout: Layout = Layout()
    calls: tuple[str, ...] = ("fit",)
    callbacks: tuple[str, ...] = ()
    epochs: int = 1
    jit: bool = False
    eagerly: bool = False
    steps_per_execution: int = 1


def layer_names(program):
    """All layers of the program, of branches and trunk."""
    names = [name for branch in program.branches for name in branch.layers]
    return (*names, *program.trunk)


def leaves_a_replica_empty(rows, replicas):
    """Whether a batch of so many rows, cut as `tf.data` does, leaves one without."""
    part = -(-rows // replicas)
    return -(-rows // part) < replicas


def has_empty_replica(program):
    """Whether any batch of the program leaves a replica without rows."""
    batches = list(program.data.sizes)
    if "fit-validate" in program.calls:
        batches.append(program.data.validation_rows)
    return any(leaves_a_replica_empty(n, program.layout.replicas) for n in batches)


def features(program):
    """What is special about the program: names, and fields not as by default."""
    found = {f"layer {name}" for name in layer_names(program)}
    found |= {f"input {branch.kind}" for branch in program.branches}
    found |= {f"option {option}" for option in program.optimizer.options}
    found |= {f"call {call}" for call in program.calls}
    found |= {f"callback {callback}" for callback in program.callbacks}
    found |= {"several inputs"} if len(program.branches) > 1 else set()
    found |= {"several outputs"} if len(program.outputs) > 1 else set()
    for part in (*program.outputs, program.optimizer, program.data, program.layout):
        found |= _changed(part, leave_out=("batches", "seed", "options", "replicas"))
    found |= _changed(program, leave_out=_TOLD_ABOVE)
    replicas = program.layout.replicas
    if any(rows % replicas for rows in program.data.sizes):
        found.add("uneven batch")
    if replicas != 2:
        found.add("one replica" if replicas == 1 else "three replicas or more")
    if program.epochs > 1:
        found.add("several epochs")
    if has_empty_replica(program):
        found.add("empty replica")
    return frozenset(found - {"input vector", "call fit"})


_TOLD_ABOVE = (
    *("branches", "trunk", "outputs", "optimizer", "data", "layout", "calls"),
    *("callbacks", "epochs"),
)


def _changed(part, leave_out):
    return {
        f"{type(part).__name__}.{field.name}={getattr(part, field.name)!r}"
        for field in dataclasses.fields(part)
        if field.name not in leave_out and getattr(part, field.name) != field.default
    }
