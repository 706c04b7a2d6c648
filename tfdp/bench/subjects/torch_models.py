"""The models of `models.MODELS` in PyTorch, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["TORCH_MODELS"]


def _mlp(inputs: int, width: int, classes: int = 10) -> Callable[[], Any]:
    def build() -> Any:
        from torch import nn

        return nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    return build


def _cnn(side: int, filters: int, width: int, classes: int = 10) -> Callable[[], Any]:
    def build() -> Any:
        from torch import nn

        pooled = (side - 4) // 2  # two convolutions take a pixel off every edge
        return nn.Sequential(
            nn.Conv2d(1, filters, 3),
            nn.ReLU(),
            nn.Conv2d(filters, 2 * filters, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * filters * pooled**2, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    return build


def _words(words: int, width: int, classes: int = 10) -> Callable[[], Any]:
    def build() -> Any:
        from torch import nn

        return nn.Sequential(
            nn.EmbeddingBag(words, width, mode="mean"), nn.Linear(width, classes)
        )

    return build


TORCH_MODELS = {
    "mlp-20m": _mlp(784, 4096),
    "mlp-tiny": _mlp(8, 16),
    "cnn-1m": _cnn(28, 32, 128),
    "cnn-tiny": _cnn(8, 2, 4),
    "words-13m": _words(200_000, 64),
    "words-tiny": _words(900, 8),
}
