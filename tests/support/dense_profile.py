"""A dense network as the simulator sees it."""

import itertools

from tfdp.tools.simulator.model import GradientSize, ModelProfile


def dense_network(name, widths):
    """Dense layers from width to width."""
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [GradientSize(4 * inputs * outputs, 2.0 * inputs * outputs)]
        layers += [GradientSize(4 * outputs, 0.0)]
    return ModelProfile(name, tuple(layers), sum(layer.work for layer in layers))
