"""Trains on two workers of Ray Train, one of which dies once; prints what came of it.

    python -m tests.support.ray_job FOLDER

Every worker's rows are its share of the same batches, and differ. After the second
epoch worker 1 ends its process; Ray starts both again, and `Checkpoint` goes on. What
Ray kept is compared with one device in tests/processes/test_ray.py.
"""

import os
import pathlib
import sys

EPOCHS, DIES_AFTER_EPOCH = 4, 1


def data():
    import numpy as np

    rows = np.random.default_rng(3).normal(size=(24, 5)).astype("float32")
    return rows[:, :4], rows[:, 4:]


def build():
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def train(config):
    """One worker."""
    import keras

    import tfdp

    strategy = tfdp.auto_strategy()
    died = pathlib.Path(config["folder"], "died")

    def die_once(epoch, logs):
        if epoch == DIES_AFTER_EPOCH and strategy.cluster.rank == 1:
            if not died.exists():
                died.touch()
                os._exit(1)

    with strategy.scope():
        model = build()
    x, y = data()
    model.fit(
        *(x, y),
        batch_size=8,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[
            tfdp.callbacks.Checkpoint(os.path.join(config["folder"], "checkpoints")),
            tfdp.ray.ReportCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=die_once),
        ],
    )


def main(folder):
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    # The workers import this module too.
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    result = trainer.fit()
    print("metrics", result.metrics["epoch"], result.metrics["loss"])
    print("checkpoint", result.checkpoint.path)


if __name__ == "__main__":
    main(sys.argv[1])
