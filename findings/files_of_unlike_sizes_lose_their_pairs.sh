#!/usr/bin/env bash
# TensorFlow 2.21.0, tf.data: AUTO and FILE sharding of a zip of two sets of files gives features
# the labels of other rows, unless both sets have as many files, cut at the same rows.
#
# MultiWorkerMirroredStrategy divides data sets so by default. Worker 0 of two takes the files 0, 2,
# ... of each set. With features in four files and labels in two, that is the rows 0, 1, 4, 5 of the
# features and 0, 1, 2, 3 of the labels; they are paired as they come, and nothing is raised,
# because both have four rows. One worker alone reads the right pairs. The policy DATA is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import os
import tempfile

import tensorflow as tf

ROWS = 8
Policy = tf.data.experimental.AutoShardPolicy


def write(folder, name, files):
    paths = [os.path.join(folder, f"{name}-{file}") for file in range(files)]
    for file, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(file * ROWS // files, (file + 1) * ROWS // files):
                writer.write(str(row).encode())
    return tf.data.TFRecordDataset(paths)


def pairs_of_workers(data, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    pairs = []
    for worker in range(2):
        shard = tf.raw_ops.AutoShardDataset(
            input_dataset=data.with_options(options)._variant_tensor,
            num_workers=2,
            index=worker,
            auto_shard_policy=policy.value,
            output_types=[tf.string, tf.string],
            output_shapes=[[], []],
        )
        shard = tf.data.experimental.from_variant(shard, data.element_spec)
        pairs += [(int(x), int(y)) for x, y in shard.as_numpy_iterator()]
    return pairs


print("tensorflow", tf.__version__)
with tempfile.TemporaryDirectory() as folder:
    features = write(folder, "features", 4)
    for files in (4, 2):
        data = tf.data.Dataset.zip(features, write(folder, f"labels-of-{files}", files))
        for policy in Policy.AUTO, Policy.DATA:
            pairs = pairs_of_workers(data, policy)
            wrong = sum(x != y for x, y in pairs)
            print(f"4 and {files} files, {policy.name}: {wrong} of 8 pairs wrong:", *pairs)
            if wrong != (4 if files == 2 and policy.name == "AUTO" else 0):
                raise SystemExit("changed")
PYTHON
