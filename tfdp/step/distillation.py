"""Makes the loss of Keras' `Distiller`, which takes means itself, a replica's share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdp.seams.losses import plain_losses
from tfdp.seams.replace import replace_for_good
from tfdp.tracing.step import current_step


def _with_share(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute_loss)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_step() is None:
            return compute_loss(self, *args, **kwargs)
        from tfdp.losses import local_mean

        with plain_losses():
            loss = compute_loss(self, *args, **kwargs)
        return local_mean(loss)

    return compute


replace_for_good("keras.distillation:Distiller", "compute_loss", _with_share)
