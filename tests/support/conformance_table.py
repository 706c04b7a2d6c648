"""The conformance table: optimizers x options x layouts x kinds of batches.

Adding an optimizer, an option, a layout or a kind of batch is adding a line here.
"""

import dataclasses

import keras

import tfdp

# Rates at which four updates move the weights by some per cent: far more than rounding,
# little enough that the problem stays smooth. Epsilons as Keras has them, but where a
# gradient of almost nothing would become a step of full size: there rounding decides.
SMALL_EPSILON = {"learning_rate": 0.02, "epsilon": 1e-3}

KERAS = keras.optimizers

OPTIMIZERS = {
    "SGD": lambda **k: KERAS.SGD(0.1, momentum=0.9, nesterov=True, **k),
    "RMSprop": lambda **k: KERAS.RMSprop(
        momentum=0.5, centered=True, **SMALL_EPSILON, **k
    ),
    "Adam": lambda **k: KERAS.Adam(amsgrad=True, **SMALL_EPSILON, **k),
    "AdamW": lambda **k: KERAS.AdamW(**SMALL_EPSILON, **{"weight_decay": 0.05, **k}),
    "Adadelta": lambda **k: KERAS.Adadelta(1.0, epsilon=1e-3, **k),
    "Adagrad": lambda **k: KERAS.Adagrad(0.05, **k),
    "Adamax": lambda **k: KERAS.Adamax(**SMALL_EPSILON, **k),
    "Adafactor": lambda **k: KERAS.Adafactor(0.05, epsilon_1=1e-6, **k),
    "Nadam": lambda **k: KERAS.Nadam(**SMALL_EPSILON, **k),
    "Ftrl": lambda **k: KERAS.Ftrl(0.1, l1_regularization_strength=1e-3, **k),
    "Lion": lambda **k: KERAS.Lion(0.02, **k),
    "Lamb": lambda **k: KERAS.Lamb(**SMALL_EPSILON, **k),
    "Muon": lambda **k: KERAS.Muon(0.02, epsilon=1e-3, **k),
    "ScheduleFreeAdamW": lambda **k: KERAS.ScheduleFreeAdamW(
        warmup_steps=2, **SMALL_EPSILON, **k
    ),
    "MultiOptimizer": lambda **k: KERAS.MultiOptimizer(
        KERAS.OptimizerMap(
            KERAS.SGD(0.1, **k), {".*kernel": KERAS.Adam(**SMALL_EPSILON, **k)}
        )
    ),
    "MultiOptimizer-Muon": lambda **k: KERAS.MultiOptimizer(
        KERAS.OptimizerMap(
            KERAS.Adam(**SMALL_EPSILON, **k), {".*kernel": KERAS.Muon(0.02, **k)}
        )
    ),
    "LARS": lambda **k: tfdp.optimizers.LARS(
        0.2, trust_coefficient=0.2, **{"weight_decay": 0.01, **k}
    ),
    "LAMB": lambda **k: tfdp.optimizers.LAMB(
        **SMALL_EPSILON, **{"weight_decay": 0.01, **k}
    ),
}

for newer_than_the_oldest_keras in ("Muon", "ScheduleFreeAdamW", "MultiOptimizer"):
    if not hasattr(KERAS, newer_than_the_oldest_keras):
        for name in [n for n in OPTIMIZERS if newer_than_the_oldest_keras in n]:
            del OPTIMIZERS[name]


@dataclasses.dataclass(frozen=True)
class Option:
    """What is asked of the optimizer, and how the batches and numbers are.

    Args:
      arguments: of the Keras optimizer.
      policy: the dtype policy of the model.
      bad_row: the row of global batch `BAD_BATCH` that holds an infinity; None: none.
      loss_scale: whether a dynamic loss scale stands around the optimizer.
      accumulate_steps: of `tfdp.DistributedOptimizer`; None leaves it out.
    """

    arguments: dict = dataclasses.field(default_factory=dict)
    policy: str = "float32"
    bad_row: int | None = None
    loss_scale: bool = False
    accumulate_steps: int | None = None

    @property
    def is_half(self) -> bool:
        return self.policy != "float32"


def fp16(bad_row, **arguments):
    return Option(arguments, "mixed_float16", bad_row, loss_scale=True)


# The third batch is whole on every replica, in every kind: row 0 is always replica 0's
# and row 7 always the last one's.
BAD_BATCH = 2

# The bounds are met by the gradients of the problem (norms 0.3 to 2, entries to 1).
OPTIONS = {
    "plain": Option(),
    "clipvalue": Option({"clipvalue": 0.1}),
    "clipnorm": Option({"clipnorm": 0.2}),
    "global_clipnorm": Option({"global_clipnorm": 0.5}),
    "accumulation-2": Option({"gradient_accumulation_steps": 2}),
    "accumulation-4": Option({"gradient_accumulation_steps": 4}),
    "accumulation-2-clipvalue": Option(
        {"gradient_accumulation_steps": 2, "clipvalue": 0.1}
    ),
    "accumulation-2-global_clipnorm": Option(
        {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}
    ),
    "distributed-1": Option(accumulate_steps=1),
    "distributed-2": Option(accumulate_steps=2),
    "distributed-4-clipnorm": Option({"clipnorm": 0.2}, accumulate_steps=4),
    "ema": Option({"use_ema": True, "ema_momentum": 0.5}),
    "ema-overwrite": Option(
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    ),
    "decay": Option({"weight_decay": 0.5}),
    "fp16-inf-first": fp16(0),
    "fp16-inf-last": fp16(7),
    "fp16-inf-last-global_clipnorm": fp16(7, global_clipnorm=0.5),
    "fp16-inf-last-accumulation-2": fp16(7, gradient_accumulation_steps=2),
    "bf16": Option(policy="mixed_bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Replicas, and how they talk."""

    replicas: int
    engine: str = "in_process"
    hierarchy: object = "flat"
    shard: str = "none"
    repeated_rows: str = "auto"

    @property
    def is_two_level(self) -> bool:
        return self.hierarchy != "flat"

    def rows(self, kind):
        """The rows of each replica in each global batch of `kind`."""
        if self.engine != "tpu":
            return KINDS[kind][self.replicas]
        part = MOST_ROWS // self.replicas
        return [
            [
                min(max(sum(counts) - rank * part, 0), part)
                for rank in range(self.replicas)
            ]
            for counts in KINDS[kind][self.replicas]
        ]


LAYOUTS = {
    "2": Layout(2),
    "4": Layout(4, "tensorflow"),
    "2x2": Layout(4, hierarchy=(2, 2)),
    "2x2-tensorflow": Layout(4, "tensorflow", (2, 2)),
    "2-sum": Layout(2, repeated_rows="sum"),
    "2x2-tensorflow-sum": Layout(4, "tensorflow", (2, 2), repeated_rows="sum"),
    "2-optimizer": Layout(2, shard="optimizer"),
    "2-gradients": Layout(2, "tensorflow", shard="gradients"),
    "2-parameters": Layout(2, shard="parameters"),
    "3-gradients": Layout(3, shard="gradients"),
    "3-parameters": Layout(3, shard="parameters"),
    "4-optimizer": Layout(4, "tensorflow", shard="optimizer"),
    "4-parameters": Layout(4, "tensorflow", shard="parameters"),
    "2x2-parameters": Layout(4, hierarchy=(2, 2), shard="parameters"),
    "2x2-tensorflow-parameters": Layout(4, "tensorflow", (2, 2), "parameters"),
    # Over the stand-in: short batches are filled up, so replicas have other rows than
    # KINDS says, of the same global batches.
    "tpu-2": Layout(2, "tpu"),
    "tpu-4": Layout(4, "tpu"),
    "tpu-2-optimizer": Layout(2, "tpu", shard="optimizer"),
    "tpu-4-optimizer": Layout(4, "tpu", shard="optimizer"),
}

# Its update takes norms of what it gets, so sharding is refused for it.
UNSHARDABLE = ("Lamb",)
# Owners update whole matrices, each alone; a TPU has one program for all replicas.
WITH_OWNERS = ("Adafactor", "Muon", "MultiOptimizer-Muon")

# Rows of each replica in each of the four global batches, by number of replicas. The
# global batches have as many rows whatever the number of replicas.
KINDS = {
    "even": {
        2: [(4, 4), (4, 4), (4, 4), (4, 4)],
        3: [(3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 3, 2)],
        4: [(2, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2)],
    },
    "short": {
        2: [(4, 4), (4, 2), (4, 4), (3, 2)],
        3: [(3, 3, 2), (3, 2, 1), (3, 3, 2), (2, 2, 1)],
        4: [(2, 2, 2, 2), (2, 2, 1, 1), (2, 2, 2, 2), (2, 1, 1, 1)],
    },
    "empty": {
        2: [(4, 4), (4, 0), (4, 4), (0, 3)],
        3: [(3, 3, 2), (4, 0, 0), (3, 3, 2), (0, 1, 2)],
        4: [(2, 2, 2, 2), (2, 2, 0, 0), (2, 2, 2, 2), (0, 2, 0, 1)],
    },
}
STEPS = 4
MOST_ROWS = 8


def make_optimizer(
    name: str, option: Option, wrap: bool = True
) -> keras.optimizers.Optimizer:
    """The optimizer of a row; `wrap` false leaves `DistributedOptimizer` out."""
    optimizer = OPTIMIZERS[name](**option.arguments)
    if option.accumulate_steps is not None and wrap:
        return tfdp.DistributedOptimizer(
            optimizer, accumulate_steps=option.accumulate_steps
        )
    if option.loss_scale:
        # Small enough not to overflow by itself, and doubling within four steps.
        return KERAS.LossScaleOptimizer(
            optimizer, initial_scale=1024.0, dynamic_growth_steps=2
        )
    return optimizer


def build(optimizer: keras.optimizers.Optimizer, variables: list) -> None:
    """Builds what a loss scaler wraps first.

    Keras' loss scaler builds it without noting the variables that it makes besides its
    slots (Nadam's product), and these tests set all variables back.
    """
    getattr(optimizer, "inner_optimizer", optimizer).build(variables)
    optimizer.build(variables)
