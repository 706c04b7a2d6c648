"""Where sizes of buckets can be tried online, and which."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.sum_speed import speed_of_sums
from tfdp.plan.buckets import Bucket
from tfdp.step.held_optimizers import optimizers_of
from tfdp.tools.simulator.machine import Link
from tfdp.tools.simulator.model import Gradient, ModelProfile
from tfdp.tools.tune.proposal import TrialFacts, predicted_speed
from tfdp.tools.tune.setting import Setting
from tfdp.tools.tune.space import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Place,
    Space,
    knobs_of,
)

__all__ = [
    "checked_pairs",
    "chosen_pairs",
    "space_of",
    "why_nothing_acts",
    "why_refused",
]

# What the cores do while a sum crosses a link; the simulator's order hardly asks.
COMPUTE_SHARE = 0.5


def checked_pairs(sizes: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """Pairs (bucket_bytes, first_bucket_bytes).

    Raises:
      ConfigurationError: they are none, or there are none.
    """
    found = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in sizes)
    for pair in found:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not all(is_whole(size, least=1) for size in pair):
            raise ConfigurationError(
                "sizes must be pairs (bucket_bytes, first_bucket_bytes) of ints of at "
                f"least 1. Received in it: {pair!r}."
            )
    if not found:
        raise ConfigurationError("sizes must hold a pair at least. Received: none.")
    return found


def why_refused(model: keras.Model) -> str | None:
    """Why nothing may be tried in trainings of `model`; None: it may."""
    strategy = model.distribute_strategy
    if model.run_eagerly:
        return (
            "the model was compiled with run_eagerly=True, where there are no buckets. "
            "Compile with run_eagerly=False, or leave the callback out."
        )
    if getattr(strategy, "living", None) is not None or any(
        getattr(optimizer, "sync", None) is not None
        for optimizer in optimizers_of(model)
    ):
        return (
            "with sync= (LocalSGD, DiLoCo) most steps send nothing, and what a few "
            "steps take says nothing of the meetings. Leave the callback out."
        )
    if strategy.extended.reducer.compressed is not None:
        return (
            "what compression did not send is kept from step to step. `tfdp tune "
            "--allow-lossy` tries settings with it, in trainings of their own."
        )
    if strategy.shard in ("gradients", "parameters"):
        return (
            f"with shard={strategy.shard!r} bucket_bytes also bounds what is in "
            "memory at once, and a larger one may not fit. `tfdp tune --memory` tries "
            "what does."
        )
    return None


def why_nothing_acts(pipeline: GradientPipeline) -> str | None:
    """Why sizes of buckets make no difference; None: they do."""
    if pipeline.engine.replicas == 1:
        return "one replica sends nothing."
    if not pipeline.engine.reduces_buckets:
        return (
            f"the engine {pipeline.engine.name!r} hands over each gradient alone, so "
            "there are no buckets. `tfdp tune` tries other engines."
        )
    return None


def space_of(model: keras.Model, pipeline: GradientPipeline) -> Space:
    """The sizes that make different buckets of the model's gradients."""
    topology = pipeline.engine.topology
    place = Place(
        topology.hosts,
        topology.devices_per_host,
        rows=topology.num_replicas,
        automatic_engine=pipeline.engine.name,
    )
    gradients = []
    for variable in model.trainable_variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        elements = math.prod(variable.shape)
        bits = int("".join(sign for sign in dtype if sign.isdigit()) or 32)
        # A layer's work grows with its weights, near enough for an order.
        gradients.append(Gradient(elements * bits // 8, float(elements), dtype))
    if not gradients:
        raise ConfigurationError("Autotune: the model has no weights to train.")
    profile = ModelProfile(model.name, tuple(gradients))
    knobs = {
        name: values
        for name, values in knobs_of(place).items()
        if name.endswith("_bytes")
    }
    return Space(place, knobs, profile)


def chosen_pairs(
    space: Space,
    own: Setting,
    step_seconds: float,
    *,
    link: HostLink | None,
    most: int,
    sizes: Sequence[tuple[int, int]] | None,
) -> list[tuple[int, int]]:
    """The sizes to try beside the program's own, the most promising first.

    All hosts must ask, since their link is timed; what worker 0 gets is what counts.

    Args:
      space: of the model.
      own: the program's own.
      step_seconds: of a step with these.
      link: between hosts; None: there is one.
      most: how many.
      sizes: pairs that the program names; None: all that make a difference.
    """
    between = None
    if link is not None and link.workers > 1:
        speed = speed_of_sums(link)
        between = Link(
            speed.latency_seconds, speed.bytes_per_second, compute_share=COMPUTE_SHARE
        )
    if sizes is not None:
        candidates = [Setting(*pair) for pair in sizes]
    else:
        pairs = [(b, f) for b in BUCKET_BYTES for f in FIRST_BUCKET_BYTES]
        candidates = [*space.settings, *(Setting(*pair) for pair in pairs)]
    facts = TrialFacts(_required(space.model), step_seconds, between)
    tried: set[tuple[Bucket, ...]] = {space.buckets(own)}
    found: list[Setting] = []
    for setting in sorted(
        candidates,
        key=lambda each: -round(predicted_speed(each, facts, space.place, own), 9),
    ):
        # Those that make the same buckets are the same training.
        if (buckets := space.buckets(setting)) not in tried:
            tried.add(buckets)
            found.append(setting)
    return [(each.bucket_bytes, each.first_bucket_bytes) for each in found[:most]]


def _required(model: ModelProfile | None) -> ModelProfile:
    if model is None:
        raise RuntimeError("a space without a model")
    return dataclasses.replace(model)
