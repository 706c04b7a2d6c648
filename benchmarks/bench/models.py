"""The models that cases train: those of `tfdp measure`, and one more."""

from __future__ import annotations

import dataclasses

from tfdp.tools.measuring import models

MODELS = {
    **models.MODELS,
    "mlp-tiny-in-tens": dataclasses.replace(
        models.MODELS["mlp-tiny"], steps_per_execution=10
    ),
}
