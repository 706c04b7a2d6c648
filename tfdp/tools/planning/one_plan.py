"""`tfdp.planning.plan`: whether a training fits in memory, before it is launched."""

from __future__ import annotations

from typing import Any

from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding
from tfdp.tools.planning.memory_plan import MemoryPlan
from tfdp.tools.planning.planner import Planner


def plan(
    model: Any,
    batch: Any,
    *,
    replicas: int = 1,
    hosts: int = 1,
    shard: str | int | Sharding = "none",
    remat: bool | str = False,
    memory_bytes: int | None = None,
    communication: Communication | None = None,
) -> MemoryPlan:
    """Predicts what a training step of `model` needs per replica, without running it.

        peak = max over the order of ops of  sum of the tensors that are held

    The step is traced as `fit` traces it, under a strategy of logical CPUs. Nothing is
    trained and `model` is not changed.

    Args:
      model: a function without arguments that builds and compiles a model, or a
        compiled model that Keras can make again from its configuration.
      batch: rows of the global batch; or arrays (x, y) of one; or a dataset's
        `element_spec`, whose first dimension is the global batch.
      replicas: replicas of each host, at least 1.
      hosts: number of hosts, at least 1.
      shard: see `auto_strategy`.
      communication: see `auto_strategy`.
      remat: whether `tfdp.remat` makes every layer a block; or its `policy`, such as
        "segments".
      memory_bytes: memory of one replica.

    Returns:
      The plan: `.peak_bytes`, `.parts`, `.fits`.

    Raises:
      ConfigurationError: an invalid argument, fewer rows than replicas, or a model that
        cannot be planned.
      DeviceError: TensorFlow has already started with fewer logical CPUs than traced.

    Cost: weights and optimizer state of at most 4 replicas, in this process; seconds.

    ```python
    import keras
    from tfdp.planning import plan

    def build():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1000)])
        model.compile("adam", "mse")
        return model

    found = plan(build, batch=32, memory_bytes=2 * 2**20)
    print(found.peak_bytes, found.fits, found.parts["slots"])
    ```

    Source: what is stored where, Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054,
    section 3; activations are counted, not taken from a formula.
    """
    planner = Planner(
        model,
        batch,
        replicas=replicas,
        hosts=hosts,
        shard=shard,
        communication=communication,
    )
    return planner.at(planner.local_rows, remat=remat, memory_bytes=memory_bytes)
