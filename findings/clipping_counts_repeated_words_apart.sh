#!/usr/bin/env bash
# TensorFlow 2.21.0 and Keras 3.15.1: the norm of an embedding's gradient is not that of the
# gradient if a word comes twice, so clipping lets through more than its limit.
#
# The gradient is an IndexedSlices with a row for each place of the word. Clipping takes the norm
# over these rows, as if they were of different words; the update adds them. For a word at 16 places
# the norm is 4 times too small, and after clipping to 1 the gradient has norm 4. It depends on how
# often words repeat in a batch, and so on the size of the batch and on how it is divided. The same
# is true of clipnorm, clipvalue, global_clipnorm, tf.clip_by_norm and tf.clip_by_global_norm; a
# dense gradient of the same numbers is clipped to 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf

word, places = 3, 16


def change(**clipping):
    model = keras.Sequential([keras.Input((places,), dtype="int32"), keras.layers.Embedding(8, 1)])
    model.compile(keras.optimizers.SGD(1.0, **clipping), lambda _, y: keras.ops.sum(y))
    before = model.get_weights()[0].copy()
    model.train_on_batch(np.full((1, places), word), np.zeros((1, places, 1)))
    return float(np.linalg.norm(model.get_weights()[0] - before))


print("tensorflow", tf.__version__, "keras", keras.__version__)
rows = tf.IndexedSlices(tf.ones((places, 1)), tf.fill([places], word), dense_shape=(8, 1))
dense = tf.convert_to_tensor(rows)
(clipped,), norm = tf.clip_by_global_norm([rows], 1.0)
(clipped_dense,), norm_dense = tf.clip_by_global_norm([dense], 1.0)
left = float(tf.norm(tf.convert_to_tensor(clipped))), float(tf.norm(clipped_dense))
print("norm by TensorFlow, of rows and dense:         ", float(norm), float(norm_dense))
print("norm after tf.clip_by_global_norm(..., 1):     ", *left)
seen = change(), change(global_clipnorm=1.0), change(clipnorm=1.0)
print("change by Keras: free, global_clipnorm, clipnorm", *seen)
if not np.allclose((*left, *seen), (4.0, 1.0, 16.0, 4.0, 4.0), rtol=1e-4):
    raise SystemExit("changed")
PYTHON
