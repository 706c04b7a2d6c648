"""Trainings that run on several hosts and on one device, for comparison.

    python -m tests.support.host_training FILE SHARD NAME...

Under TFDP_* variables every worker trains each scenario and writes its numbers to
FILE.rank.npz. SHARD is stage/group/engine/offload/balance, as far as they matter:
optimizer/host, none/all/tensorflow. With balance the shares of the hosts change in each
step: see `planned_shares`.
"""

import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support import kept_optimizers, planned_shares, programs
from tests.support.parity import classification_data, dense_model
from tfdp.exchange import over_collectives

ROWS = 53  # in batches of 24: 24, 24 and 5, which leaves replicas without a row


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fitted(build=dense_model, optimizer=None, data=None, epochs=2, **options):
    """Numbers of a training: weights, losses, evaluation and predictions."""
    keras.utils.set_random_seed(3)
    model = build()
    model.compile(
        optimizer() if optimizer else keras.optimizers.SGD(0.05, 0.9),
        options.pop("loss", None) or crossentropy(),
        metrics=["accuracy"],
        **{"jit_compile": False, **options},
    )
    x, y = data or classification_data(ROWS)
    batch_losses = []
    note_batch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch_losses.append(logs["loss"])
    )
    history = model.fit(
        x, y, batch_size=24, epochs=epochs, verbose=0, callbacks=[note_batch]
    )
    return {
        **{f"weight{i}": w for i, w in enumerate(model.get_weights())},
        "losses": history.history["loss"],
        "batch_losses": batch_losses,
        "accuracies": history.history["accuracy"],
        "evaluation": model.evaluate(x, y, batch_size=24, verbose=0),
        "predictions": model.predict(x, batch_size=24, verbose=0),
        "predictions_on_batch": _of_one_host(model, model.predict_on_batch(x[:5])),
    }


def _of_one_host(model, predictions):
    """All hosts' rows, which are alike here: the mean over the hosts."""
    strategy = model.distribute_strategy
    hosts = strategy.num_replicas_in_sync
    if hosts > 1:
        hosts //= len(strategy.extended.worker_devices)
    return np.reshape(predictions, (hosts, 5, -1)).mean(axis=0)


def normalized_model():
    keras.utils.set_random_seed(3)
    hidden, logits = dense_model().layers
    normalize = tfdp.layers.SyncBatchNormalization()
    return keras.Sequential([keras.Input((12,)), hidden, normalize, logits])


def embedding_model():
    keras.utils.set_random_seed(3)
    tokens = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(9, 5, mask_zero=True)(tokens)
    return keras.Model(tokens, keras.layers.Dense(4)(embedded))


def recurrent_model():
    keras.utils.set_random_seed(3)
    tokens = keras.Input((6,), dtype="int32")
    # Dense gradients: an embedding's would square repeated words one by one.
    one_hot = keras.layers.CategoryEncoding(9, output_mode="one_hot")(tokens)
    states = keras.layers.LSTM(5, return_sequences=True)(one_hot)
    return keras.Model(tokens, keras.layers.Dense(4)(states))


def sequences():
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 9, (ROWS, 6))
    tokens[np.arange(6)[None] >= rng.integers(1, 7, ROWS)[:, None]] = 0
    return tokens, rng.integers(0, 4, tokens.shape)


def words_model(*behind_the_mean):
    """A mean over the words of a text, which is none of a text without words."""
    keras.utils.set_random_seed(3)
    words = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(9, 512, mask_zero=True)(words // 2)
    mean = keras.layers.GlobalAveragePooling1D()(embedded)
    for layer in behind_the_mean:
        mean = layer(mean)
    # Large enough for a branch (`tfdp.tracing.rows`); the last layer is not.
    hidden = keras.layers.Dense(520, "tanh")(mean)
    return keras.Model(words, keras.layers.Dense(4)(hidden))


def texts_with_one_left():
    """24, 24 and 1: a host is left without a row, and makes one up, of a 1 and 0s."""
    rng = np.random.default_rng(1)
    return rng.integers(2, 18, (49, 6)), rng.integers(0, 4, 49)


def loss_scaling():
    """float16, with an infinity in one row: one update of each epoch is left out."""
    x, y = classification_data(ROWS)
    x[23] = np.inf
    keras.config.set_dtype_policy("mixed_float16")
    try:
        numbers = fitted(data=(x, y))
    finally:
        keras.config.set_dtype_policy("float32")
    # Means over that row are not numbers.
    return {key: value for key, value in numbers.items() if key.startswith("weight")}


def in_float64(optimizer):
    """Newton-Schulz multiplies errors by up to 485 a step: too much for float32."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        return fitted(optimizer=optimizer)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def made_for_a_loop(rows):
    """A strategy, a model, an optimizer, and `rows` in batches over the replicas."""
    strategy = tf.distribute.get_strategy()
    keras.utils.set_random_seed(3)
    model = dense_model()
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(rows).batch(24)
    )
    return strategy, model, optimizer, dataset


def custom_loop():
    """A loop of one's own over a distributed dataset, with `reduce` and `gather`."""
    strategy, model, optimizer, dataset = made_for_a_loop(classification_data(ROWS))

    def replica_step(features, labels):
        with tf.GradientTape() as tape:
            loss = tfdp.losses.local_mean(
                tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(
                        labels, model(features)
                    )
                )
            )
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        # A replica without rows has no mean.
        return tf.where(tf.math.is_nan(loss), 0.0, loss), labels

    @tf.function
    def step(batch):
        losses, labels = strategy.run(replica_step, args=batch)
        return strategy.reduce("SUM", losses, axis=None), strategy.gather(labels, 0)

    results = [step(batch) for batch in dataset]
    return {
        **{f"weight{i}": w for i, w in enumerate(model.get_weights())},
        "losses": [float(loss) for loss, _ in results],
        "labels": np.concatenate([labels.numpy() for _, labels in results]),
    }


def gathered_rows():
    """A contrastive loss: each row against all rows of the batch, wherever they are.

    And what programs for TensorFlow's own strategies add up where replicas meet.
    """
    x, _ = classification_data(ROWS)
    strategy, model, optimizer, dataset = made_for_a_loop(x)
    total, mean = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN

    def met(strategy, value, table, three):
        inside = strategy.extended
        (both,) = inside.batch_reduce_to(total, [(value, value)])
        rows = inside.reduce_to(total, table, table)
        three = inside.reduce_to(mean, three, value)
        return inside.reduce_to(total, value, value), both, rows, three

    def sums_where_replicas_meet(features):
        context = tf.distribute.get_replica_context()
        value = tf.reduce_sum(features)
        table = tf.IndexedSlices(features, tf.range(tf.shape(features)[0]), [24, 12])
        *sums, rows, three = context.merge_call(met, (value, table, tf.constant(3.0)))
        return *sums, tf.reduce_sum(rows.values), three

    def replica_step(features):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            own = model(features)
            everyone = context.all_gather(own, 0)
            close = tf.reduce_logsumexp(own @ tf.transpose(everyone), axis=1)
            loss = tfdp.losses.local_mean(
                tf.reduce_mean(close - tf.reduce_sum(own**2, axis=1))
            )
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        loss = tf.where(tf.math.is_nan(loss), 0.0, loss)
        across = context.all_gather(tf.transpose(features), 1)
        return loss, tf.reduce_sum(across), sums_where_replicas_meet(features)

    @tf.function
    def step(batch):
        loss, gathered, sums = strategy.run(replica_step, args=(batch,))
        loss = strategy.reduce("SUM", loss, axis=None)
        return loss, *map(one_of, (gathered, *sums))

    def one_of(value):
        return strategy.experimental_local_results(value)[0]

    results = [step(batch) for batch in dataset]
    eager = strategy.run(sums_where_replicas_meet, args=(next(iter(dataset)),))
    return {
        **{f"weight{i}": w for i, w in enumerate(model.get_weights())},
        "graph": np.array([[float(number) for number in row] for row in results]),
        "eager": [float(one_of(value)) for value in eager],
    }


def compiled_model():
    keras.utils.set_random_seed(3)
    model = dense_model()
    model.compile(keras.optimizers.SGD(0.05), crossentropy(), jit_compile=False)
    return model


def rows_and_labels(strategy, dataset):
    """How many rows all hosts together see in an epoch, and the sum of their labels."""

    @tf.function
    def count(batch):
        def rows_of(features, labels):
            return tf.shape(features)[0], tf.reduce_sum(tf.cast(labels, tf.int32))

        return [
            strategy.reduce("SUM", value, axis=None)
            for value in strategy.run(rows_of, args=batch)
        ]

    return np.sum([[int(n) for n in count(batch)] for batch in dataset], axis=0)


def parts_of_different_length():
    """Each host makes its own part; one has three times as many batches."""
    strategy = tf.distribute.get_strategy()
    model = compiled_model()
    x, y = classification_data(ROWS)

    def part(context):
        hosts, host = context.num_input_pipelines, context.input_pipeline_id
        # The last host takes the last five rows, the first ones share the rest.
        rows = range(ROWS) if hosts == 1 else range(48)[host :: hosts - 1]
        if hosts > 1 and host == hosts - 1:
            rows = range(48, ROWS)
        mine = tf.data.Dataset.from_tensor_slices((x[list(rows)], y[list(rows)]))
        return mine.batch(5)

    dataset = strategy.distribute_datasets_from_function(part)
    seen = rows_and_labels(strategy, dataset)
    model.fit(dataset, epochs=1, verbose=0)
    return {"rows and labels": seen}


def own_files():
    """Each host reads its own files: the rows of an epoch, and a training on them."""
    strategy = tf.distribute.get_strategy()
    model = compiled_model()
    x, y = classification_data(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        index = tfdp.data.write_tfrecords({"x": x, "y": y}, folder, num_shards=3)

        def own(context):
            return tfdp.data.read_tfrecords(
                index, 24, as_supervised=("x", "y"), input_context=context
            )

        dataset = strategy.distribute_datasets_from_function(own)
        seen = rows_and_labels(strategy, dataset)
        model.fit(dataset, epochs=2, verbose=0)
        loss = model.evaluate(dataset, verbose=0)
    return {"rows and labels": seen, "loss is finite": float(np.isfinite(loss))}


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, **options)


SCENARIOS = {
    "sgd": fitted,
    "accumulation": lambda: fitted(optimizer=adam(gradient_accumulation_steps=2)),
    "clipping": lambda: fitted(optimizer=adam(global_clipnorm=0.1)),
    # A division by 3 rounds: hosts that compute it another way drift apart.
    "clipped-accumulation": lambda: fitted(
        optimizer=adam(global_clipnorm=0.1, gradient_accumulation_steps=3)
    ),
    "ema": lambda: fitted(optimizer=adam(use_ema=True, ema_overwrite_frequency=2)),
    "lars": lambda: fitted(optimizer=lambda: tfdp.optimizers.LARS(0.5)),
    "lamb": lambda: fitted(optimizer=lambda: tfdp.optimizers.LAMB(0.01)),
    "distributed-optimizer": lambda: fitted(
        optimizer=lambda: tfdp.DistributedOptimizer(
            keras.optimizers.SGD(0.05, global_clipnorm=0.1), accumulate_steps=2
        )
    ),
    "steps-per-execution": lambda: fitted(steps_per_execution=2),
    "jit": lambda: fitted(jit_compile=True),
    "synchronized": lambda: fitted(normalized_model),
    "masked-embedding": lambda: fitted(embedding_model, data=sequences()),
    "words": lambda: fitted(words_model, data=texts_with_one_left()),
    "recurrent": lambda: fitted(recurrent_model, data=sequences(), optimizer=adam()),
    "muon": lambda: in_float64(lambda: keras.optimizers.Muon(0.01, epsilon=1e-3)),
    "muon-everything": lambda: in_float64(
        lambda: keras.optimizers.Muon(
            0.01,
            epsilon=1e-3,
            global_clipnorm=0.1,
            gradient_accumulation_steps=3,
            use_ema=True,
            ema_overwrite_frequency=2,
        )
    ),
    "adafactor": lambda: in_float64(
        lambda: keras.optimizers.Adafactor(0.01, epsilon_1=1e-6)
    ),
    "loss-scaling": loss_scaling,
    "custom-loop": custom_loop,
    "gathered-rows": gathered_rows,
    "optimizer-in-a-dictionary": kept_optimizers.in_a_dictionary,
    "built-while-traced": programs.built_while_traced,
    "parts": parts_of_different_length,
    "own-files": own_files,
}


def run(name, strategy):
    """The numbers of one scenario, as arrays."""
    with strategy.scope():
        numbers = SCENARIOS[name]()
    return {key: np.asarray(value) for key, value in numbers.items()}


def main(path, shard, names):
    stage, group, engine, offload, balance, *_ = [*shard.split("/"), "", "", "", ""]
    if engine == "tensorflow":
        # The models here are small; so that all of it takes this way, in pieces.
        over_collectives.SMALLEST_BYTES = 0
        over_collectives.CHUNK_BYTES = 256
    shares = planned_shares.take() if balance else set()
    strategy = tfdp.MultiHostDataParallelStrategy(
        shard=stage,
        shard_group=group or "all",
        shard_min_bytes=0,
        offload=offload or "none",
        balance=balance or None,
        communication=tfdp.Communication(engine=engine or "auto"),
    )
    print("engine", strategy.engine_name, flush=True)
    rank = strategy.cluster.rank
    for name in names:
        np.savez(f"{path}.{name}.{rank}.npz", **run(name, strategy))
        keras.utils.clear_session()
        print(name, flush=True)
    assert len(shares) >= (strategy.hosts if balance else 0), shares
    loaded = {"tfdp.plan.balance", "tfdp.step.row_shares"} & set(sys.modules)
    assert bool(loaded) == bool(balance), loaded
    own_pace = {"tfdp.hosts.pushes", "tfdp.step.own_pace", "tfdp.step.owned_parts"}
    assert not own_pace & set(sys.modules)


if __name__ == "__main__":
    os.environ.setdefault("TFDP_DEVICES_PER_WORKER", "2")
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
