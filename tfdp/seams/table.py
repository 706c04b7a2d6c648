"""The table of seams: which method of Keras or TensorFlow is replaced, when, and why.

tfdp is exact because it changes what these methods do in its replicas. So a Keras or a
TensorFlow with other signatures is refused: it would train on, with wrong numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import CodeType
from typing import Any

import keras
import tensorflow as tf

# The versions whose signatures are in the table.
CHECKED_VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1"}
UNCHECKED = "TFDP_UNCHECKED"


@dataclasses.dataclass(frozen=True)
class Seam:
    """One method that tfdp replaces, or that a replacement calls.

    Args:
      owner: "module" or "module:Class" that defines it.
      attribute: its name.
      signature: its parameters as Python prints them, without annotations; None if
        versions that work differ; `DATA` for an attribute that is no function.
      when: "always" (once per process; the replacement calls the original outside of
        tfdp's replicas), "asked" (once per process that calls the public function for
        it), "step" (on instances, while replicas are traced), "loop" (on instances,
        during a loop of `fit`, `evaluate` or `predict`), "object" (on one instance for
        as long as it lives), or "context" (within a `with` of tfdp's).
        "called": it stays Keras', and a replacement calls it.
      why: what the replacement adds.
    """

    owner: str
    attribute: str
    signature: str | None
    when: str
    why: str


#: The signature of an attribute with data, which only instances have.
DATA = "data"


def _seams(owner: str, when: str, why: str, **signatures: str | None) -> list[Seam]:
    """Seams of one owner that have a reason in common, by their names."""
    return [Seam(owner, name, s, when, why) for name, s in signatures.items()]


@dataclasses.dataclass(frozen=True)
class Look:
    """Local variables of a function of Keras that tfdp reads from the call stack.

    Args:
      owner: "module" or "module:Class" that defines the function.
      function: its name.
      names: the local variables, or functions defined in it.
      why: what Keras offers no other way to.
    """

    owner: str
    function: str
    names: tuple[str, ...]
    why: str


KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"
TENSORFLOW_RANDOM = "tensorflow:random"
KERAS_RANDOM = "keras.src.backend.tensorflow.random"
MODEL = "keras:Model"

LOOKS: tuple[Look, ...] = (
    Look(
        MODEL,
        "fit",
        ("self", "callbacks", "epoch_iterator", "initial_epoch", "val_x")
        + ("epoch", "epochs"),
        "callbacks get neither the input of their fit nor each other",
    ),
    Look(
        MODEL,
        "evaluate",
        ("self", "callbacks"),
        "on several hosts its callbacks must not write on each of them",
    ),
    Look(MODEL, "predict", ("self",), "a predict in a fit is no loop of that fit"),
    Look(
        MODEL,
        "_make_function",
        ("one_step_on_data",),
        "Keras averages what strategy.run returns to this function over the replicas",
    ),
    Look(
        MODEL,
        "make_predict_function",
        ("one_step_on_data_distributed",),
        "Keras joins what strategy.run returns to this function",
    ),
)

DISTRIBUTION = "keras.src.distribution.distribution_lib"
LAYOUT_MAP = "keras.distribution:LayoutMap"
DEVICE_MESH = "keras.distribution:DeviceMesh"
LOSS = "keras.src.losses.loss"
OPTIMIZER = "keras.optimizers:Optimizer"
EPOCH_ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"
VARIABLE = "keras:Variable"
STRATEGY = "tensorflow.python.distribute.distribute_lib:StrategyBase"
TENSORFLOW_CONTEXT = "tensorflow.python.eager.context:Context"
TENSORFLOW_GRAPHS = "tensorflow.compat.v1"

ARRAYS = "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter"
LOOP = f"{KERAS_TRAINER}:TFEpochIterator"


def is_of_keras_3_16() -> bool:
    """Whether the installed Keras is 3.16 or newer, a nightly included."""
    return tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)


IN_PARTS = "a layer computes with its replica's part of a weight (layout=)"
SINCE_3_16 = (
    *_seams(ARRAYS, "always", "epochs differ in order", _tf_shuffle="(self, tensors)"),
    *_seams(LOOP, "always", "numbers passes over arrays", _get_iterator="(self)"),
    *_seams(
        MODEL,
        "always",
        "a step takes its batch in its graph, and is traced once",
        _make_function="(self, step_function)",
    ),
)

# Keras 3.12 has no such function.
DEVICE_COUNT = _seams(
    DISTRIBUTION,
    "asked",
    "counts the devices of all workers",
    get_device_count="(device_type=None)",
)

SEAMS: tuple[Seam, ...] = (
    *(SINCE_3_16 if is_of_keras_3_16() else ()),
    # Losses (`tfdp.seams.losses`).
    Seam(
        LOSS,
        "reduce_weighted_values",
        "(values, sample_weight=None, mask=None, reduction='sum_over_batch_size', "
        "dtype=None)",
        "always",
        "a replica's loss is divided by the denominator of the whole batch",
    ),
    Seam(
        LOSS,
        "reduce_values",
        "(values, sample_weight=None, reduction='sum_over_batch_size')",
        "always",
        "a replica's mean that was taken elsewhere is refused",
    ),
    Seam(
        LOSS,
        "scale_loss_for_distribution",
        "(value)",
        "always",
        "a replica's penalties are scaled to its share of the rows",
    ),
    Seam(
        LOSS,
        "unscale_loss_for_distribution",
        "(value)",
        "always",
        "a report takes the exact factor of a replica's share back",
    ),
    Seam(
        "keras.distillation:Distiller",
        "compute_loss",
        "(self, x=None, y=None, y_pred=None, sample_weight=None, training=True)",
        "always",
        "it takes means over a replica's rows itself, which become its share",
    ),
    *_seams(
        LOSS,
        "called",
        "",
        standardize_reduction="(reduction)",
        apply_mask="(sample_weight, mask, dtype, reduction)",
        squeeze_or_expand_to_same_rank="(x1, x2, expand_rank_1=True)",
    ),
    # These register facts for `tfdp.lint` (`tfdp.tracing.statements`).
    Seam(
        "tensorflow:GradientTape",
        "gradient",
        "(self, target, sources, output_gradients=None, unconnected_gradients="
        "<UnconnectedGradients.NONE: 'none'>)",
        "always",
        "a replica notes which number a gradient is of",
    ),
    Seam(
        "tensorflow.python.ops.custom_gradient",
        "_graph_mode_decorator",
        "(f, args, kwargs)",
        "always",
        "in a replica a program's own gradients are looked at",
    ),
    *_seams(
        "tensorflow",
        "always",
        "in a replica also a static number of rows is known as one",
        shape="(input, out_type=None, name=None)",
        size="(input, out_type=None, name=None)",
    ),
    Seam(
        "keras.layers:BatchNormalization",
        "call",
        "(self, inputs, training=None, mask=None)",
        "always",
        "statistics of a replica's own rows are documented: no warning",
    ),
    Seam(
        "tensorflow:nn",
        "ctc_loss",
        "(labels, logits, label_length, logit_length, logits_time_major=True, "
        "unique=None, blank_index=None, name=None)",
        "always",
        "it is known to give a loss of each row",
    ),
    Seam(
        "keras.layers:RNN",
        "call",
        "(self, sequences, initial_state=None, mask=None, training=False)",
        "always",
        "a state for each row is refused: a replica has some of the rows",
    ),
    Seam(
        "tensorflow.python.distribute.distribute_lib:ReplicaContextBase",
        "replica_id_in_sync_group",
        None,
        "always",
        "a condition that depends on the rank is known to differ by replica",
    ),
    *(
        Seam(f"keras.layers:{layer}", "call", signature, "step", IN_PARTS)
        for layer, signature in (
            ("Dense", "(self, inputs, training=None)"),
            ("EinsumDense", "(self, inputs, training=None)"),
            ("Embedding", "(self, inputs)"),
            ("ReversibleEmbedding", "(self, inputs, reverse=False)"),
            ("MultiHeadAttention", None),
            ("GroupQueryAttention", None),
        )
    ),
    *_seams("keras:Layer", "step", "a part has fewer features", _input_spec=DATA),
    # What Keras does to variables, metrics, models and loops.
    *_seams(
        VARIABLE,
        "always",
        "notes the value that is added: Keras assigns the sum",
        assign_add="(self, value)",
        assign_sub="(self, value)",
    ),
    Seam(
        VARIABLE,
        "_initialize",
        "(self, value)",
        "always",
        "notes the Keras variable whose TensorFlow variable is created",
    ),
    Seam(
        "keras.metrics:Mean",
        "update_state",
        "(self, values, sample_weight=None)",
        "always",
        "a number of all rows of a replica counts by the replica's rows",
    ),
    Seam(
        "keras.metrics:MeanMetricWrapper",
        "update_state",
        "(self, y_true, y_pred, sample_weight=None)",
        "always",
        "a number that a program's own function returns is checked first",
    ),
    Seam(
        MODEL,
        "_maybe_symbolic_build",
        "(self, iterator=None, data_batch=None)",
        "always",
        "notes the model that is built: Keras reads a batch only for its shapes",
    ),
    Seam(
        MODEL,
        "_symbolic_build",
        "(self, iterator=None, data_batch=None)",
        "always",
        "a model in replicas is built from a plain batch, no PaddedBatch",
    ),
    Seam(
        LOOP,
        "__init__",
        "(self, distribute_strategy=None, *args, **kwargs)",
        "always",
        "notes the loop whose input is distributed",
    ),
    # Instances, while replicas are traced; of several rows for one method, and of
    # several replacements by one row, the later runs first and calls the earlier.
    *_seams(
        OPTIMIZER,
        "step",
        "gradients are summed before they are clipped, tested and used",
        apply="(self, grads, trainable_variables=None)",
        apply_gradients="(self, grads_and_vars)",
        _all_reduce_sum_gradients="(self, grads_and_vars)",
        _clip_gradients="(self, grads)",
    ),
    *_seams(
        OPTIMIZER,
        "step",
        "each replica updates its shards",
        _backend_apply_gradients="(self, grads, trainable_variables)",
        _backend_update_step="(self, grads, trainable_variables, learning_rate)",
        _distributed_tf_update_step="(self, distribution, grads_and_vars, "
        "learning_rate)",
        _apply_weight_decay="(self, variables)",
        _update_model_variables_moving_average="(self, trainable_variables)",
        _overwrite_model_variables_with_average_value="(self, trainable_variables)",
        update_step="(self, gradient, variable, learning_rate)",
    ),
    *_seams(
        OPTIMIZER,
        "context",
        "optimizers are built before the step, and several of a model by themselves",
        scale_loss="(self, loss)",
        add_variable="(self, shape, initializer='zeros', dtype=None, "
        "aggregation='none', layout=None, name=None)",
        build="(self, variables)",
        built=DATA,
    ),
    *_seams(
        OPTIMIZER,
        "object",
        "an optimizer made outside of the scope is moved into it; one that needs whole "
        "matrices chooses their owners when it is built",
        _distribution_strategy=DATA,
        build="(self, variables)",
    ),
    *_seams(
        "keras.optimizers:LossScaleOptimizer",
        "step",
        "replicas agree on whether gradients are finite",
        check_finite="(self, grads)",
    ),
    *_seams(
        VARIABLE,
        "step",
        "the state of a shard has the shard's shape while it is updated",
        _shape=DATA,
    ),
    *_seams(
        "keras.metrics:Metric",
        "step",
        "results are noted, to be computed from the sums of all replicas; padding "
        "does not count",
        result="(self)",
        update_state="(self, *args, **kwargs)",
    ),
    *_seams(
        "keras.losses:Loss",
        "step",
        "sums of rows are shares of the sum over all rows",
        call="(self, y_true, y_pred)",
    ),
    *_seams(
        MODEL,
        "step",
        "padding and dummy rows have no loss; the loss is checked",
        compute_loss="(self, x=None, y=None, y_pred=None, sample_weight=None, "
        "training=True)",
        compute_metrics="(self, x, y, y_pred, sample_weight=None)",
        _aggregate_additional_loss="(self, loss)",
    ),
    *_seams(
        "keras.layers:Layer",
        "step",
        "each replica has its own added losses; padding is no part of statistics; "
        "blocks compute twice (object)",
        call="(self, *args, **kwargs)",
        _losses=DATA,
    ),
    *_seams(
        "tensorflow.python.distribute.distribute_lib:ReplicaContext",
        "step",
        "dummy rows are not gathered",
        all_gather="(self, value, axis, options=None)",
        all_reduce="(self, reduce_op, value, options=None)",
    ),
    # Instances, for longer.
    *_seams(
        EPOCH_ITERATOR,
        "loop",
        "hosts keep their loops in step, and a fit begins within an epoch",
        _get_iterator="(self)",
        _enumerate_iterator="(self)",
    ),
    Seam(
        EPOCH_ITERATOR,
        "catch_stop_iteration",
        "(self)",
        "loop",
        "hosts end their loops in step, and late updates are made where a loop ends",
    ),
    *_seams(
        "keras.src.trainers.data_adapters.data_adapter:DataAdapter",
        "loop",
        "no epoch begins while a model is built, and passes are counted",
        on_epoch_begin="(self)",
        on_epoch_end="(self)",
    ),
    *_seams(
        MODEL,
        "object",
        "an epoch without remaining batches ends with the logs of before",
        _get_metrics_result_or_logs="(self, logs)",
    ),
    *_seams(
        MODEL,
        "context",
        "a model with its own train_step is built without the compiled optimizer",
        optimizer=DATA,
    ),
    *_seams(
        "keras.src.ops.function:Function",
        "object",
        "a functional model computes twice, segment by segment",
        _run_through_graph=None,
    ),
    *_seams(
        "keras.random:SeedGenerator",
        "context",
        "a block that computes twice draws the same numbers again",
        next="(self, ordered=True)",
    ),
    *_seams(
        VARIABLE,
        "context",
        "large weights of a model that never runs stay empty",
        _initialize_with_initializer="(self, initializer)",
    ),
    *_seams(
        VARIABLE,
        "context",
        "Keras writes a mark in the place of a variable to the file of a checkpoint",
        _value=DATA,
    ),
    # A user's script that `tfdp check`, `plan` or `tune` runs until its first `fit`.
    Seam(
        STRATEGY,
        "__new__",
        None,
        "always",
        "a strategy that such a script makes is replaced by the command's",
    ),
    *_seams(
        MODEL,
        "context",
        "stops the script, and keeps what fit was called with",
        fit="(self, x=None, y=None, batch_size=None, epochs=1, verbose='auto', "
        "callbacks=None, validation_split=0.0, validation_data=None, shuffle=True, "
        "class_weight=None, sample_weight=None, initial_epoch=0, "
        "steps_per_epoch=None, validation_steps=None, validation_batch_size=None, "
        "validation_freq=1)",
    ),
    *_seams(
        MODEL,
        "context",
        "what the stopped script does at its end overwrites no trained model",
        save=None,
        save_weights=None,
    ),
    *_seams(
        TENSORFLOW_CONTEXT,
        "context",
        "the devices are those of the command, made before the script runs",
        set_logical_device_configuration=None,
        set_visible_devices=None,
        set_memory_growth=None,
        intra_op_parallelism_threads=None,
        inter_op_parallelism_threads=None,
    ),
    *_seams(
        TENSORFLOW_GRAPHS,
        "context",
        "the scope around the script outlives its clear_session",
        reset_default_graph="()",
    ),
    *_seams(
        KERAS_RANDOM,
        "context",
        "`tfdp check` draws the same numbers for each row, on any number of replicas",
        normal="(shape, mean=0.0, stddev=1.0, dtype=None, seed=None)",
        uniform="(shape, minval=0.0, maxval=1.0, dtype=None, seed=None)",
        truncated_normal="(shape, mean=0.0, stddev=1.0, dtype=None, seed=None)",
        randint="(shape, minval, maxval, dtype='int32', seed=None)",
        categorical="(logits, num_samples, dtype='int64', seed=None)",
        dropout="(inputs, rate, noise_shape=None, seed=None)",
    ),
    *_seams(
        TENSORFLOW_RANDOM,
        "context",
        "as `keras.random`, for steps that draw with TensorFlow",
        normal=None,
        uniform=None,
        truncated_normal=None,
    ),
    # Scripts of `keras.distribution`.
    *_seams(
        DISTRIBUTION,
        "asked",
        "its mesh and layouts become those of a strategy (obey_keras_distribution)",
        set_distribution="(value)",
        list_devices="(device_type=None)",
        initialize="(job_addresses=None, num_processes=None, process_id=None)",
        distribute_tensor="(tensor, layout)",
    ),
    *(DEVICE_COUNT if hasattr(keras.distribution, "get_device_count") else ()),
    *_seams(
        LAYOUT_MAP,
        "context",
        "`tfdp plan` lists the rules that Keras refuses",
        __setitem__="(self, key, layout)",
    ),
    *_seams(
        DEVICE_MESH,
        "context",
        "`tfdp plan` needs no device of the mesh",
        __init__="(self, shape, axis_names, devices=None)",
    ),
    *_seams(
        "tensorflow.python.trackable.base:Trackable",
        "object",
        "files hold what one device would have written",
        _serialize_to_tensors="(self)",
        _restore_from_tensors="(self, restored_tensors)",
    ),
    *_seams(
        "tensorflow.python.distribute.input_lib:DistributedDataset",
        "object",
        "datasets outlive their readers",
        _cloned_datasets=DATA,
    ),
    *_seams(
        "tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction",
        "object",
        "datasets outlive their readers",
        _datasets=DATA,
    ),
    *_seams(
        "keras.callbacks:Callback",
        "object",
        "on several hosts only worker 0 writes files",
        set_model="(self, model)",
        **{
            f"on_{what}{when}": f"(self, {given}logs=None)"
            for when in ("_begin", "_end")
            for what, given in (
                *(("epoch", "epoch, "), ("batch", "batch, "), ("train", "")),
                *(("test", ""), ("predict", ""), ("train_batch", "batch, ")),
                *(("test_batch", "batch, "), ("predict_batch", "batch, ")),
            )
        },
    ),
)


@functools.cache
def owner_of(row: Seam | Look) -> Any:
    """The module or class that defines the method."""
    module, _, name = row.owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def names_in(code: CodeType) -> set[str]:
    """The local variables of a function, those of functions in it included."""
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


def checked_versions() -> str:
    """The installed versions and those to install, for errors."""
    checked = " ".join(f"{name}=={v}" for name, v in CHECKED_VERSIONS.items())
    return (
        f"Installed are Keras {keras.__version__} and TensorFlow {tf.__version__}: "
        f"install versions that tfdp was checked with, {checked}."
    )
