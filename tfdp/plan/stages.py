"""Stages of a pipeline: which calls each has, and how long they are idle. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def stage_ends(costs: Sequence[float], kept: Sequence[float], stages: int) -> list[int]:
    """The last call of each stage: the most equal costs, by the sum of their squares.

    Of equal ones those that keep least at the cuts, then those with long first stages.
    `kept`: after each call, the size of what later ones read. Each stage has a call.

    >>> stage_ends([1] * 7, [1] * 7, stages=3)
    [2, 4, 6]
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By the number of calls in the stages so far: the best, and its ends.
    best: dict[int, tuple[tuple[float, float], list[int]]] = {0: ((0.0, 0.0), [])}
    for stage in range(stages):
        before, best = best, {}
        for end in range(stage + 1, len(costs) - (stages - stage - 1) + 1):
            for begin, ((squares, crossing), ends) in before.items():
                if begin >= end:
                    continue
                square = round(squares + (sums[end] - sums[begin]) ** 2, 9)
                key = square, crossing + kept[end - 1]
                if end not in best or key <= best[end][0]:
                    best[end] = key, [*ends, end - 1]
    return best[len(costs)][1]


def idle_share(stages: int, micro_batches: int) -> float:
    """The part of a step in which a stage waits, with stages of equal time.

    Source: Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.3.

    >>> round(idle_share(stages=4, micro_batches=8), 3)
    0.273
    """
    return (stages - 1) / (micro_batches + stages - 1)


def held_activations(stages: int, micro_batches: int, stage: int) -> int:
    """The micro-batches whose activations a stage holds, in the order 1F1B.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.

    >>> [held_activations(4, 8, stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(micro_batches, stages - stage)
