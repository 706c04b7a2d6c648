"""Expressions of tensors, and what the analysis must say of each.

A row is "expected: expression"; the next line continues it where it is indented. The
expression names its arguments, those of `tests/devices/test_lint_rules.py`:

    x y     rows of 6 features     t    rows of 4 steps of 6 features
    v k m   a number, a label, a truth of each row       i g  images, volumes
    w u p   weights, and an index, that all replicas have      f r  factors of losses

Expected are the terms ("ZERO": none), with "@" and the axes of the rows; the power of n
after "^"; whether each row has a "variable" number of entries, or only "selected" rows
have any; the kinds of crossings; and other reasons, after "+", why the value may differ
by replica. "static": the number of rows is. "*": the numbers of two replicas are not
compared, because they are drawn, or because the claim is about larger batches.
"""

# Sums, products and functions; each with what it is.
SUMS_AND_MEANS = """
ROWS@0: x + 0.0
ROWS@0: tf.tanh(x @ w)
ROWS@0: x * y + x / (1.5 + tf.abs(y))
ROWS@0: every_function(x, y)
ROWS@0: tf.nn.bias_add(x, u)
MEAN: mean(x)
MEAN: tf.reduce_mean(x, 0)
ROWS@0: tf.reduce_mean(x, 1)
ROWS@0: tf.reduce_mean(x, -1)
ROWS@0: tf.reduce_mean(x, 1, keepdims=True)
SUM: tf.reduce_sum(tf.reduce_max(t, 1), 0)
SUM: total(x)
SUM: total(tf.reduce_mean(x, 1))
MEAN: mean(tf.reduce_sum(x, 1))
SUM: tf.nn.l2_loss(x)
REPLICATED: tf.nn.l2_loss(w)
MEAN: 0.5 * mean(x)
MEAN: mean(x) + mean(y * y)
MEAN: mean(x) - mean(y * y)
MEAN: tf.add_n([mean(x), mean(y), mean(x)])
MEAN CONSTANT: mean(x) + 1.0
MEAN REPLICATED: mean(x) + mean(w)
SUM REPLICATED: total(x) + mean(w)
MEAN SUM: mean(x) + total(x)
MEAN: mean(x) * mean(w)
MEAN: mean(x) / mean(w * w)
MEAN: -mean(x)
REPLICATED CONSTANT: tf.sqrt(mean(w * w)) + 1.0
CONSTANT: tf.constant(3.0) * 2.0
CONSTANT: tf.cos(tf.zeros([2]))
+rows: tf.zeros([]) * mean(x)
MEAN: tf.zeros([]) + mean(x)
OTHER nonlinear: tf.sqrt(mean(x * x))
OTHER nonlinear: tf.square(total(x))
OTHER nonlinear: tf.abs(mean(x))
OTHER nonlinear: tf.pow(mean(x * x), 1.5)
OTHER nonlinear: tf.math.log(mean(x * x))
OTHER nonlinear: tf.math.squared_difference(mean(x), mean(y))
OTHER nonlinear: mean(x) * mean(y)
OTHER nonlinear: mean(x) * total(y)
OTHER quotient: total(x) / total(y * y)
OTHER nonlinear: tf.math.reciprocal(total(x * x))
OTHER normalized: 1 / total(x * x)
OTHER quotient: tf.math.divide_no_nan(total(x), total(y * y))
ROWS@0: tf.math.multiply_no_nan(x, y)
OTHER nonlinear: tf.math.multiply_no_nan(mean(x), mean(y))
OTHER nonlinear: tf.maximum(mean(x), 0.0)
OTHER nonlinear: tf.clip_by_value(mean(x), -0.02, 0.02)
MEAN: mean(tf.clip_by_value(x, 0.0, 1.0))
ROWS@0 normalized: x - tf.reduce_mean(x, 0)
ROWS@0 normalized: x * mean(x)
ROWS@0 normalized: v / total(v * v)
MEAN normalized: mean(v * v / mean(v * v) * tf.reduce_sum(x * x, 1))
MEAN normalized nonlinear *: mean(tf.square((x - tf.reduce_mean(x, 0)) /
    tf.math.reduce_std(x, 0)))
OTHER normalized: tf.reduce_max(x)
ROWS@0: tf.reduce_max(x, 1)
OTHER normalized: tf.reduce_min(x, 0)
OTHER normalized: tf.reduce_prod(v)
OTHER normalized *: tf.reduce_any(m)
OTHER normalized *: tf.reduce_all(m)
OTHER normalized: tf.raw_ops.EuclideanNorm(input=x, axis=[0, 1])
ROWS@0: tf.raw_ops.EuclideanNorm(input=x, axis=[1])
ROWS@0: tf.argmax(x, 1)
OTHER normalized: tf.argmax(x, 0)
OTHER normalized *: tf.argmin(v, 0)
OTHER normalized nonlinear: tf.reduce_logsumexp(v)
ROWS@0: tf.nn.softmax(x)
ROWS@0: tf.nn.log_softmax(x)
ROWS@0 normalized: tf.nn.softmax(x, 0)
ROWS@0 normalized: tf.nn.softmax(v)
ROWS@0 normalized: tf.nn.log_softmax(v)
ROWS@0 normalized: tf.cumsum(x)
ROWS@0: tf.cumsum(x, 1)
ROWS@0 normalized: tf.math.cumprod(x)
ROWS@0: tf.math.cumprod(x, -1)
ROWS@0 normalized: tf.math.cumulative_logsumexp(x)
SUM: tf.cumsum(tf.reduce_sum(x, 0))
MEAN: tf.debugging.check_numerics(mean(x), "")
MEAN: tf.identity(tf.stop_gradient(mean(x)))
MEAN: tf.raw_ops.IdentityN(input=[x, mean(y)])[1]
REPLICATED +rows: tf.math.is_finite(total(x))
REPLICATED@0 +rows: tf.math.is_nan(x)
ROWS@0: tf.sign(x)
OTHER nonlinear *: tf.sign(mean(x))
SUM: total(tf.cast(x > 0, tf.float32))
ROWS@0 normalized: v / total(tf.cast(v > 0, tf.float32))
OTHER quotient: total(v) / total(tf.cast(v > 0, tf.float32))
MEAN: tf.reduce_mean(tf.stack([mean(x), mean(y)]))
MEAN: mean(tf.cos(x))
ROWS@0: tf.logical_and(x > 0, tf.logical_not(y > 0))
ROWS@0: tf.atan2(x, y)
"""

# The number of rows, which differs by replica.
COUNTS = """
COUNT ^1 +counts: count(x)
REPLICATED: tf.shape(x)[1]
CONSTANT: tf.shape(w)[0]
COUNT ^1 +counts: tf.size(v)
COUNT ^1 +counts: tf.size(x)
CONSTANT: tf.rank(x)
COUNT ^1 +counts: tf.reduce_prod(tf.shape(x))
COUNT ^? +counts: tf.reduce_sum(tf.shape(x))
COUNT ^2 +counts: count(x) * count(x)
COUNT ^-1 +counts: 1 / count(x)
COUNT ^0 +counts: count(x) / count(x)
COUNT CONSTANT ^? +counts *: count(x) - 1
COUNT ^? +counts: tf.sqrt(count(x))
COUNT ^1 +counts: total(tf.ones_like(x))
SUM: total(tf.ones_like(v) * mean(v))
SUM normalized: total(tf.boolean_mask(tf.ones_like(v) * mean(v), m))
SUM joined: tf.math.unsorted_segment_sum(tf.reverse(x, [0]), k, 6)
UNKNOWN +rows: tf.scatter_nd(tf.stack([tf.range(tf.size(v)), k], 1), v, [8, 6])
ROWS@0 joined:
    tf.linalg.diag_part(tf.matmul(x, tf.reverse(x, [0]), transpose_b=True))
OTHER: total(tf.ones_like(v) * total(v))
OTHER ^? +counts: total(tf.boolean_mask(v + count(v), m))
UNKNOWN +rows: total(tf.boolean_mask(v * tf.cast(tf.range(tf.size(v)), tf.float32), m))
COUNT ^1 +counts: total(tf.ones(tf.shape(x)[:1]))
REPLICATED ^1 +counts: total(tf.fill([tf.shape(x)[0]], mean(w)))
CONSTANT@0 +counts: tf.ones_like(x)
@0 +counts: tf.zeros_like(x)
@0 +counts *: tf.zeros([tf.shape(x)[0], 2])
CONSTANT@0 +counts: tf.ones([tf.shape(x)[0], 2])
CONSTANT@1 +counts: tf.ones([2, tf.shape(x)[0]])
CONSTANT: mean(tf.ones_like(x))
MEAN: total(x) / count(x)
MEAN: total(x) / tf.cast(tf.size(x), tf.float32)
MEAN: 1 / count(x) * total(x)
MEAN: total(x) / total(tf.ones_like(x))
SUM: mean(x) * count(x)
OTHER ^? +counts: total(x) / (count(x) - 1)
OTHER ^? +counts: total(x) / tf.sqrt(count(x))
SUM ^1 +counts: total(x) * count(x)
MEAN ^-1 +counts: mean(x) / count(x)
MEAN: total(x / count(x))
SUM: mean(x * count(x))
MEAN ^-1 +counts: mean(x / count(x))
MEAN COUNT ^? *: mean(x) + 1 / count(x)
OTHER ^? +counts: mean(tf.tanh(x / count(x)))
OTHER ^? +counts: mean(tf.tanh(x + count(x)))
CONSTANT@0 +counts *: tf.range(tf.shape(x)[0])
COUNT ^? +counts *: mean(tf.cast(tf.range(tf.shape(x)[0]), tf.float32))
SUM joined: total(v * tf.cast(tf.range(tf.shape(v)[0]), tf.float32))
MEAN COUNT ^?: (total(x) + 1) / count(x)
OTHER * ^? +counts: total(x) / tf.cast(tf.shape(x) * 2, tf.float32)[1]
COUNT ^1 +counts: total(tf.ones(tf.shape(t)[:-1]))
COUNT ^1 +counts: total(tf.ones(tf.concat([[2], tf.shape(t)[:2], [3]], 0)))
CONSTANT: tf.ones(tf.shape(t)[1:])
COUNT ^1 +counts: tf.shape(x)[::-1][1]
COUNT ^1 +counts: tf.shape(x)[-2]
MEAN static *: total(x) / 8
MEAN static *: total(x) / 48
MEAN static *: total(x) * 0.125
SUM static *: total(x) / 10
MEAN static *: total(x) / x.shape[0]
"""

# Rows that are chosen, moved or put together.
SELECTIONS = """
ROWS@0 selected *: tf.boolean_mask(x, m)
SUM: total(tf.boolean_mask(x, m))
MEAN normalized: mean(tf.boolean_mask(x, m))
SUM: tf.shape(tf.boolean_mask(x, m))[0]
OTHER quotient: total(x) / tf.cast(tf.shape(tf.boolean_mask(x, m))[0], tf.float32)
SUM: total(tf.ones_like(tf.boolean_mask(x, m)))
ROWS@0: tf.where(x > 0, x, y)
MEAN: tf.where(mean(w) > 0, mean(x), 2 * mean(x))
ROWS@0 normalized nonlinear: tf.where(mean(x) > 0, x, -x)
OTHER nonlinear *: tf.where(mean(x) > -5, mean(x), mean(y))
MEAN *: tf.where(count(x) > 4, mean(x), 0.0)
SUM: total(tf.where(x > 0, x, 0.0))
ROWS@0: tf.raw_ops.Select(condition=m, x=x, y=2 * x)
ROWS@0 selected *: tf.where(m)
SUM: total(tf.gather(x, tf.where(m)[:, 0]))
ROWS@0: tf.math.top_k(x, 2)[0]
MEAN chosen normalized: mean(tf.math.top_k(v, 2)[0])
SUM chosen: total(tf.math.top_k(v, 2)[0])
ROWS@0 selected chosen: tf.math.top_k(v, 2)[1]
ROWS@0: tf.sort(x, axis=1)
ROWS@0 selected chosen *: tf.sort(v)
SUM chosen *: total(tf.sort(v))
ROWS@0 selected chosen: tf.unique(k)[0]
ROWS@0 selected chosen: tf.unique_with_counts(k)[2]
ROWS@0 selected chosen: tf.raw_ops.UniqueV2(x=k, axis=[0])[0]
REPLICATED: tf.unique(u)[0]
OTHER chosen: x[0]
SUM chosen: total(x[:2])
MEAN chosen: mean(x[:2])
MEAN chosen: mean(x[::2])
ROWS@0: x[:, 0]
ROWS@1: x[tf.newaxis, ..., 0]
ROWS@0: x[..., tf.newaxis]
ROWS@0: t[..., 1:3]
ROWS@0: t[:, -1, :]
ROWS@0: x[:, p]
ROWS@0: x[0:]
ROWS@0 selected joined: x[1:] - x[:-1]
ROWS@0 selected joined *: x[::2] * x[1::2]
MEAN chosen: mean(tf.slice(x, [1, 0], [2, 6]))
ROWS@0: tf.slice(x, [0, 1], [tf.shape(x)[0], 2])
REPLICATED: tf.slice(tf.shape(x), [1], [1])[0]
ROWS@0: tf.slice(x, [0, 1], [-1, 2])
MEAN: mean(x[::-1])
MEAN joined: mean(x * x[::-1])
ROWS@0: x * x[:, ::-1]
ROWS@0 joined: x + tf.reverse(x, [0])
ROWS@0: x + tf.reverse(x, [1])
ROWS@0 joined: x * tf.roll(x, 1, 0)
ROWS@0: x * tf.roll(x, 1, 1)
MEAN: mean(tf.random.shuffle(x))
ROWS@0 joined *: x * tf.random.shuffle(x)
ROWS@0 joined *: tf.random.shuffle(x) * tf.random.shuffle(x)
ROWS@0 joined *: x + tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0])))
MEAN: mean(tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))))
ROWS@0: x + tf.gather(x, [5, 4, 3, 2, 1, 0], axis=1)
OTHER chosen: tf.gather(x, 0)
MEAN chosen: mean(tf.gather(x, [0, 1]))
ROWS@0: tf.gather(w, k)
ROWS@1: tf.gather(w, k, axis=1)
REPLICATED: tf.gather(w, p)
ROWS@0: tf.gather(x, k, batch_dims=1)
UNKNOWN +rows *: mean(tf.gather(x, k) * x)
ROWS@0: tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), k], 1))
ROWS@0: tf.gather_nd(x, k[:, None], batch_dims=1)
ROWS@0: tf.one_hot(k, 6)
ROWS@1: tf.one_hot(k, 6, axis=0)
ROWS@0: tf.reduce_sum(x * tf.one_hot(k, 6), 1)
MEAN: mean(tf.concat([x, y], 0))
ROWS@0: tf.add(*tf.split(tf.concat([x, 2 * y], 0), 2))
MEAN: mean(y * tf.concat([x, y], 0)[:tf.shape(x)[0]])
MEAN: mean(y * tf.concat([x, y], 0)[tf.shape(x)[0]:])
MEAN static *: mean(y * tf.concat([x, y], 0)[:8])
MEAN static *: mean(y * tf.concat([x, y], 0)[8:])
MEAN chosen static *: mean(tf.concat([x, y], 0)[4:12])
ROWS@0: tf.gather(tf.reshape(x, [-1]), tf.range(tf.shape(x)[0]) * 6 + k)
ROWS@0: x * tf.gather(x, tf.range(tf.shape(x)[0]))
ROWS@0 joined: x * tf.gather(x, (tf.range(tf.shape(x)[0]) + 1) % tf.shape(x)[0])
ROWS@0 joined: x * tf.gather(x, tf.shape(x)[0] - 1 - tf.range(tf.shape(x)[0]))
UNKNOWN +rows *: mean(tf.gather(x, k))
MEAN normalized *: mean(tf.split(tf.concat([x, x, y, y], 0), 2)[0])
ROWS@0: tf.concat([x, y], 1)
ROWS@0: tf.split(x, 2, axis=1)[0]
ROWS@0: tf.split(x, [1, 5], axis=1)[1]
MEAN joined normalized static *: mean(tf.multiply(*tf.split(x, 2)))
MEAN joined normalized static *: mean(x - tf.concat(tf.split(x, 2)[::-1], 0))
OTHER REPLICATED: mean(tf.concat([x, w], 0))
MEAN: mean(tf.tile(x, [3, 1]))
SUM: total(tf.tile(x, [3, 1]))
ROWS@0: tf.tile(x, [1, 2])
MEAN joined *: mean(tf.tile(x, [2, 1]) * tf.concat([y, y], 0))
ROWS@0: tf.pad(x, [[0, 0], [1, 2]])
ROWS@0: tf.pad(x, [[0, 0], [1, 2]], constant_values=1)
ROWS@0: tf.pad(x, [[0, 0], [1, 2]], "REFLECT")
UNKNOWN +rows: total(tf.pad(x, [[0, 2], [0, 0]]))
ROWS@0: tf.broadcast_to(x[:, None, :], [tf.shape(x)[0], 3, 6])
ROWS@1: tf.stack([x, y])
ROWS@0: tf.stack([x, y], -1)
MEAN: tf.stack([mean(x), mean(y)])
MEAN: tf.stack([mean(x), mean(y)])[1]
ROWS@0: tf.unstack(tf.stack([x, y]))[1]
ROWS@0: tf.unstack(t, axis=1)[2]
UNKNOWN +rows static *: tf.unstack(x)[0]
MEAN: tf.unstack(tf.reduce_mean(x, 0))[0]
SUM: tf.scatter_nd(k[:, None], x, [6, 6])
SUM: tf.scatter_nd(k[:, None], tf.ones_like(k), [6])
SUM REPLICATED: tf.tensor_scatter_nd_add(w, k[:, None], x)
SUM REPLICATED: tf.tensor_scatter_nd_sub(w, k[:, None], x)
OTHER: tf.tensor_scatter_nd_update(w, k[:, None], x)
SUM: tf.math.unsorted_segment_sum(x, k, 6)
SUM *: tf.math.segment_sum(x, k)
SUM: tf.math.bincount(k, minlength=6, maxlength=6)
ROWS@0: tf.raw_ops.DenseBincount(input=tf.cast(x > 0, tf.int32), size=2,
    weights=tf.zeros([0]))
SUM: tf.histogram_fixed_width(v, [-1.0, 1.0], 4)
SUM: tf.raw_ops.Bincount(arr=k, size=6, weights=tf.zeros([0]))
"""

# Reshaped and transposed tensors.
SHAPES = """
ROWS@0: tf.reshape(t, [-1, 24])
ROWS@0: tf.reshape(t, [tf.shape(t)[0], -1])
ROWS@0: tf.reshape(x, tf.shape(y))
MEAN: mean(tf.reshape(t, [-1, 6]))
MEAN: mean(tf.tanh(tf.reshape(t, [-1, 6]) @ w))
ROWS@0: tf.reduce_sum(tf.reshape(tf.tanh(tf.reshape(t, [-1, 6])), [-1, 4, 6]), 1)
UNKNOWN +rows *: tf.reshape(tf.reshape(t, [-1, 6]), [-1, 8, 6])
UNKNOWN +rows *: tf.nn.softmax(tf.reshape(x, [-1, 12]))
MEAN: mean(tf.reshape(x, [-1]))
ROWS@1: tf.reshape(v, [1, -1])
ROWS@0: tf.reshape(v, [-1, 1])
ROWS@1 normalized: tf.nn.softmax(tf.reshape(v, [1, -1]))
UNKNOWN +rows *: tf.nn.softmax(tf.reshape(x, [1, -1]))
ROWS@0 static *: tf.reshape(t, [8, 24])
MEAN static *: mean(tf.reshape(t, [32, 6]))
UNKNOWN +rows static *: tf.nn.softmax(tf.reshape(x, [4, 12]))
ROWS@0 normalized static *: tf.nn.softmax(tf.reshape(x, [48]))
ROWS@0 static *: tf.reshape(x, [8, 1, 6])
ROWS@1: tf.expand_dims(x, 0)
ROWS@0: tf.expand_dims(x, -1)
ROWS@0: tf.squeeze(x[:, None, :, None], [1, 3])
ROWS@0: tf.squeeze(x[None, :], 0)
ROWS@1: tf.transpose(x)
ROWS@1 normalized: tf.nn.softmax(tf.transpose(x))
SUM: tf.reduce_sum(tf.transpose(x), 1)
ROWS@1: tf.transpose(t, [1, 0, 2])
SUM: tf.reduce_sum(tf.transpose(t, [1, 0, 2]), 1)
UNKNOWN +rows *: tf.nn.softmax(tf.reshape(tf.transpose(t, [1, 0, 2]), [4, -1]))
REPLICATED: tf.transpose(w)
REPLICATED: tf.linalg.diag_part(w)
ROWS@0: tf.ensure_shape(x, [None, 6])
"""

# Matrix products; rows that are summed over, or paired.
CONTRACTIONS = """
ROWS@0: x @ w
ROWS@0: tf.matmul(x, w, transpose_b=True)
ROWS@1: tf.matmul(w, x, transpose_b=True)
ROWS@1: tf.matmul(w, x, transpose_a=True, transpose_b=True)
SUM: tf.matmul(x, x, transpose_a=True)
SUM: tf.matmul(x, y, transpose_a=True)
ROWS@0,1: tf.matmul(x, x, transpose_b=True)
MEAN paired: mean(tf.matmul(x, x, transpose_b=True))
MEAN: mean(tf.linalg.diag_part(tf.matmul(x, y, transpose_b=True)))
MEAN: tf.matmul(x, x, transpose_a=True) / count(x)
OTHER nonlinear *: mean(tf.sqrt(tf.square(tf.matmul(x, x, transpose_a=True))))
MEAN paired joined:
    mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]),
    tf.matmul(x, x, transpose_b=True)))
OTHER paired: mean(tf.nn.softmax_cross_entropy_with_logits(tf.eye(tf.shape(x)[0]),
    tf.matmul(x, x, transpose_b=True)))
MEAN paired: mean(tf.abs(x[:, None] - x[None]))
ROWS@0 paired: tf.reduce_sum(v[:, None] * v[None], 1)
SUM paired: tf.reduce_sum(tf.cast(k[:, None] == k[None], tf.float32))
ROWS@0 paired: tf.reduce_max(tf.matmul(x, x, transpose_b=True), 1)
OTHER paired: tf.reshape(tf.matmul(x, x, transpose_b=True), [-1])
ROWS@0,1 paired: tf.nn.softmax(tf.matmul(x, x, transpose_b=True))
ROWS@0: tf.matmul(t, t, transpose_b=True)
ROWS@0: tf.nn.softmax(tf.matmul(t, t, transpose_b=True)) @ t
ROWS@0: tf.matmul(t, t, transpose_a=True)
ROWS@0: tf.matmul(t, w)
ROWS@0: tf.einsum("bi,ij->bj", x, w)
ROWS@0,1: tf.einsum("bi,ci->bc", x, x)
SUM paired: tf.einsum("bi,ci->", x, x)
SUM: tf.einsum("bi,bj->ij", x, x)
SUM: tf.einsum("bi->i", x)
ROWS@0: tf.einsum("bth,bsh->bts", t, t)
ROWS@0: tf.einsum("...i,ij->...j", x, w)
ROWS@0: tf.tensordot(t, w, 1)
SUM: tf.tensordot(v, x, 1)
ROWS@0 normalized: tf.linalg.matvec(x, tf.reduce_mean(x, 0))
OTHER nonlinear: tf.tensordot(tf.reduce_mean(x, 0), tf.reduce_mean(y, 0), 1)
SUM: tf.linalg.trace(tf.matmul(x, x, transpose_a=True))
"""

# Ops of images and of losses.
LAYERS = """
ROWS@0: tf.nn.conv2d(i, tf.ones([3, 3, 3, 2]), 1, "SAME")
ROWS@0 normalized: tf.nn.conv2d(i, tf.ones([3, 3, 3, 2]) * mean(i), 1, "SAME")
ROWS@0: tf.nn.conv2d_transpose(i, tf.ones([3, 3, 2, 3]), [tf.shape(i)[0], 8, 8, 2],
    1)
ROWS@0: tf.nn.depthwise_conv2d(i, tf.ones([3, 3, 3, 1]), [1, 1, 1, 1], "SAME")
ROWS@0: tf.nn.conv3d(g, tf.ones([2, 2, 2, 2, 1]), [1] * 5, "SAME")
ROWS@0: tf.nn.avg_pool2d(i, 2, 2, "SAME")
ROWS@0: tf.nn.avg_pool3d(g, 2, 2, "SAME")
ROWS@0: tf.nn.max_pool2d(i, 2, 2, "SAME")
ROWS@0: tf.nn.max_pool3d(g, 2, 2, "SAME")
ROWS@0: tf.raw_ops.MaxPoolV2(input=i, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1],
    padding="SAME")
ROWS@0: tf.image.resize(i, [4, 4])
ROWS@0: tf.image.resize(i, [4, 4], "nearest")
ROWS@0: tf.image.resize(i, [4, 4], "bicubic")
MEAN: tf.nn.conv2d(tf.reduce_mean(i, 0, keepdims=True), tf.ones([3, 3, 3, 2]), 1,
    "SAME")
UNKNOWN +rows static *: tf.nn.conv2d(tf.transpose(i, [3, 1, 2, 0]), tf.ones([3, 3, 8,
    2]), 1, "SAME")
ROWS@0 *: tf.raw_ops.FusedBatchNormV3(x=i, scale=tf.ones(3), offset=tf.zeros(3),
    mean=[], variance=[])[0]
UNKNOWN +rows *: tf.raw_ops.FusedBatchNormV3(x=i, scale=tf.ones(3), offset=tf.zeros(3),
    mean=[], variance=[])[1]
ROWS@0: tf.nn.sparse_softmax_cross_entropy_with_logits(k, x)
ROWS@0 variable: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x)
ROWS@0: tf.nn.leaky_relu(tf.nn.elu(tf.nn.selu(x)))
"""

# Called functions, branches and loops.
FLOWS = """
SUM: scaled_sum(x, 0.5)
SUM: scaled_sum(x, scaled_sum(w, 1.0))
REPLICATED: scaled_sum(w, 0.5)
MEAN: scaled_sum(x, 1 / count(x))
ROWS@0: squared_twice(x)
OTHER MEAN nonlinear *: squared(mean(x)) + mean(squared(y))
ROWS@0: tf.function(lambda: x @ w, autograph=False)()
ROWS@0 normalized: captured(mean(x))(y)
ROWS@0: tf.custom_gradient(lambda z: (z * 2, lambda d: d))(x)
MEAN: tf.cond(p > 0, lambda: mean(x), lambda: 2 * mean(x))
MEAN: tf.cond(p > 0, lambda: mean(x), lambda: 0.0)
MEAN SUM *: tf.cond(p > 0, lambda: mean(x), lambda: total(x))
SUM: tf.cond(count(x) > 1, lambda: total(x), lambda: 0.0)
UNKNOWN +rows *: tf.cond(p > 0, lambda: tf.transpose(x), lambda:
    tf.transpose(tf.transpose(x)))
ROWS@0 normalized *: tf.cond(p > 0, lambda: x, lambda: x - tf.reduce_mean(x, 0))
ROWS@0: tf.switch_case(p, [lambda: x, lambda: 2 * x, lambda: x * x])
MEAN: tf.cond(p > 0, lambda: tf.cond(p > 1, lambda: mean(x), lambda: -mean(x)), lambda:
    scaled_sum(x, 1 / count(x)))
ROWS@0: over_steps(t, tf.zeros_like(t[:, 0]))
ROWS@0: over_steps(t, tf.zeros([tf.shape(t)[0], 6]))
ROWS@0 MEAN normalized: over_steps(t, tf.zeros_like(t[:, 0]) + tf.reduce_mean(t))
MEAN: tf.while_loop(lambda j, _: j < 3, lambda j, z: (j + 1, z + mean(x)), (0, 0.0))[1]
OTHER MEAN CONSTANT nonlinear *: tf.while_loop(lambda j, _: j < 3, lambda j, z: (j + 1,
    z * mean(x)), (0, 1.0))[1]
MEAN OTHER nonlinear *: tf.while_loop(lambda j, _: j < 3, lambda j, z: (j + 1,
    tf.tanh(z) * 1.0), (0, mean(x)))[1]
ROWS@0: tf.while_loop(lambda j, _: j < 3, lambda j, z: (j + 1, squared(z) * 0.5), (0,
    x))[1]
ROWS@0: tf.while_loop(lambda j, _: j < 2, lambda j, z: (j + 1, over_steps(t, z)), (0,
    tf.zeros_like(t[:, 0])))[1]
ROWS@0: tf.while_loop(lambda j, _: j < 4, lambda j, z: (j + 1, tf.cond(j > 1, lambda: z
    + x, lambda: z * 1.0)), (0, tf.zeros_like(x)))[1]
ROWS@0: tf.map_fn(lambda row: row * 2, x)
MEAN *: mean(tf.map_fn(lambda row: tf.reduce_max(row), t))
ROWS@0 *: tf.map_fn(lambda pair: pair[0] * pair[1], (x, y),
    fn_output_signature=tf.float32)
ROWS@0 normalized *: tf.map_fn(lambda row: row - mean(x), x)
ROWS@0: tf.vectorized_map(lambda row: row * 2, x)
ROWS@0 joined: tf.scan(lambda a, row: 0.9 * a + row, x)
ROWS@1: tf.scan(lambda a, step: tf.tanh(a + step), tf.transpose(t, [1, 0, 2]),
    tf.zeros_like(t[:, 0]))
ROWS joined *: tf.foldl(lambda a, row: 0.9 * a + row, x)
UNKNOWN +rows *: over_rows(x)
ROWS@0: tf.transpose(tf.TensorArray(tf.float32, 4).unstack(tf.transpose(t, [1, 0,
    2])).stack(), [1, 0, 2])
ROWS@1: tf.TensorArray(tf.float32, 2).write(0, x).write(1, 2 * x).stack()
ROWS@0: tf.TensorArray(tf.float32, 1, clear_after_read=False).write(0, x).read(0)
ROWS@0: popped(x)
UNKNOWN +rows *: tf.numpy_function(lambda z: z, [x], tf.float32)
"""

# Numbers that were scaled to a replica's share of the loss of all.
LOSSES = """
SHARE: share(f, x)
SHARE: mean(x) * f
SHARE: share(f, x) + share(f, y)
SHARE: 0.3 * share(f, x) * mean(w)
SHARE: share(f, x) / mean(w)
SHARE: -share(f, x) / 2.0
SHARE: share(f, x) - share(f, y)
SHARE MEAN *: share(f, x) + mean(x)
SHARE REPLICATED: share(f, x) + mean(w)
SHARE CONSTANT: share(f, x) + 1.0
SHARE ^1 +counts *: share(f, x) * count(x)
SHARE ^-1 +counts *: share(f, x) / count(x)
MIXED: f * share(f, x)
MIXED: share(f, x) * share(f, y)
MIXED: share(f, x) * mean(y)
MIXED: share(f, x) / mean(y * y)
MIXED: share(f, x) / share(f, y)
MIXED: 1 / share(f, x)
MIXED: tf.sqrt(share(f, x * x))
MIXED: tf.square(share(f, x))
MIXED: tf.exp(share(f, x))
MIXED *: tf.maximum(share(f, x), 0.1)
SHARE: tf.debugging.check_numerics(share(f, x), "")
SHARE: tf.cast(tf.cast(share(f, x), tf.float64), tf.float32)
SHARE: tf.stack([share(f, x), share(f, y)])[1]
SHARE: tf.reduce_sum(tf.stack([share(f, x), share(f, y)]))
SHARE: mean(tf.stack([share(f, x), share(f, y)]))
MIXED *: tf.reduce_max(tf.stack([share(f, x), share(f, y)]))
SHARE: tf.gather(tf.stack([share(f, x), share(f, y)]), 1)
SHARE: tf.unstack(tf.stack([share(f, x), share(f, y)]))[0]
SHARE: tf.concat([[share(f, x)], [share(f, y)]], 0)
SHARE: tf.add_n([share(f, x), share(f, y)])
SHARE: tf.tensordot(tf.stack([share(f, x), share(f, y)]), u[:2], 1)
SHARE: tf.einsum("i,i->", tf.stack([share(f, x), share(f, y)]), u[:2])
MIXED: tf.einsum("i,i->", tf.stack([share(f, x)]), tf.stack([share(f, y)]))
SHARE: tf.where(mean(w) > 0, share(f, x), 0.0)
SHARE: tf.where(count(x) > 0, share(f, x), 0.0)
SHARE: tf.where(tf.math.is_finite(share(f, x)), share(f, x), 0.0)
MIXED *: tf.where(share(f, x) > 0.01, share(f, x), 0.0)
SHARE: tf.cond(p > 0, lambda: share(f, x), lambda: 2 * share(f, x))
SHARE: tf.cond(p > 0, lambda: share(f, x), lambda: 0.0)
SHARE: tf.while_loop(lambda j, _: j < 3, lambda j, z: (j + 1, z + share(f, x)), (0,
    0.0))[1]
SHARE MIXED *: tf.while_loop(lambda j, _: j < 2, lambda j, z: (j + 1, z * z), (0,
    share(f, x)))[1]
SHARE: scaled_sum(share(f, x), 0.5)
MIXED: squared(share(f, x))
SHARE: tf.squeeze(tf.reshape(share(f, x), [1, 1]))
MIXED: mean(w) / share(f, x)
MIXED: mean(y) * share(f, x)
SHARE *: total(f * tf.reduce_mean(x, 1))
REPORTED +rows *: share(f, x) * r
MIXED *: share(f, x) / f
MIXED -rows *: tf.sqrt(f)
SHARE: tf.stop_gradient(share(f, x))
SHARE: tf.zeros([]) * share(f, x)
"""

# Exchanges, variables, drawn numbers, ops without a rule.
OTHERS = """
REPLICATED +all -rows *: register_exchanged(total(x) * 1.0)
MEAN +all *: mean(x - register_exchanged(tf.reduce_mean(x, 0) * 1.0))
SUM +all *: total(x) / register_exchanged(count(x) * 1.0)
REPLICATED +all *: tf.sqrt(register_exchanged(total(x * x) * 1.0))
MEAN +all *: mean(tf.matmul(x, register_exchanged(x * 1.0), transpose_b=True))
REPLICATED +drawn *: mean(tf.random.normal([3]))
REPLICATED@0 +drawn *: tf.random.uniform(tf.shape(x))
ROWS@0 +drawn *: x + tf.random.normal(tf.shape(x))
MEAN +drawn *: mean(x * tf.random.normal(tf.shape(x)))
REPLICATED +drawn *: tf.random.uniform([2], 0, 9, tf.int32)
REPLICATED +drawn *: tf.random.truncated_normal([2])
REPLICATED +drawn *: tf.random.gamma([2], 1.0)
REPLICATED +drawn *: tf.random.poisson([2], 1.0)
REPLICATED +drawn *: tf.random.categorical(w, 2)
REPLICATED: tf.random.stateless_normal([3], [1, 2])
REPLICATED: tf.random.stateless_uniform([3], [1, 2])
REPLICATED: tf.random.stateless_uniform([3], [1, 2], 0, 9, tf.int32)
REPLICATED: tf.random.stateless_truncated_normal([3], [1, 2])
ROWS@0 +drawn *: tf.nn.dropout(x, 0.5)
REPLICATED +drawn *: mean(tf.nn.dropout(w, 0.5))
REPLICATED *: state()[0] * 2.0
ROWS@0: tf.gather(state()[0], k)
REPLICATED: tf.gather(state()[0], p)
REPLICATED +drawn *: state()[1].normal([2])
REPLICATED +drawn *: state()[1].make_seeds(1)
REPLICATED: raw("Normal", x)
REPLICATED: raw("Uniform", x)
REPLICATED: raw("UniformInt", x)
ROWS@0: tf.raw_ops.Add(x=x, y=x) + tf.raw_ops.Div(x=x, y=x)
ROWS@0: tf.raw_ops.BatchMatMul(x=t, y=t, adj_y=True) + tf.raw_ops.BatchMatMulV3(x=t,
    y=t, Tout=tf.float32, adj_y=True)
ROWS@0: tf.raw_ops.PreventGradient(input=tf.raw_ops.Snapshot(input=x))
CONSTANT: tf.raw_ops.Rank(input=x)
COUNT ^1 +counts: tf.raw_ops.ShapeN(input=[w, x])[1][0]
REPLICATED: tf.raw_ops.ShapeN(input=[w, x])[0][0]
ROWS@0 selected chosen: tf.raw_ops.UniqueWithCountsV2(x=k, axis=[0])[2]
REPLICATED +drawn *: tf.raw_ops.ParameterizedTruncatedNormal(shape=[2], means=0.0,
    stdevs=1.0, minvals=-1.0, maxvals=1.0)
REPLICATED@0 +rows: tf.math.is_inf(x)
REPLICATED: tf.raw_ops.DiagPart(input=w)
ROWS@0: tf.raw_ops.MatrixDiagPart(input=tf.raw_ops.MatrixDiag(diagonal=x))
ROWS@0: tf.raw_ops.MatrixDiagPartV2(input=tf.raw_ops.MatrixDiagV2(diagonal=x, k=0,
    num_rows=6, num_cols=6, padding_value=0.0), k=0, padding_value=0.0)
ROWS@0,1 *: tf.linalg.diag(v)
ROWS@0: tf.math.bessel_i0(x)
REPLICATED: tf.math.bessel_i0(w)
ROWS@0: tf.math.zeta(tf.abs(x) + 2, tf.abs(mean(w)) + 1)
MIXED *: tf.math.bessel_i0(share(f, x))
COUNT ^? +counts *: tf.bitwise.invert(tf.shape(x))[1]
ROWS@0: tf.math.real(tf.math.conj(tf.complex(x, y))) + tf.math.imag(tf.complex(x, y))
ROWS@0: tf.abs(tf.complex(x, y))
ROWS@0: tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(k, 5), tf.bitwise.bitwise_xor(k,
    3))
ROWS@0: tf.raw_ops.Bucketize(input=x, boundaries=[0.0]) + tf.raw_ops.Mod(x=k, y=3)[:,
    None]
ROWS@0: tf.strings.to_number(tf.strings.join([tf.as_string(k), "0"]))
ROWS@0: tf.strings.to_hash_bucket_fast(tf.strings.lower(tf.as_string(k)), 7)
ROWS@0: tf.strings.length(tf.strings.regex_replace(tf.strings.substr(tf.as_string(k),
    0, 1), "1", "ab"))
ROWS@0: tf.strings.to_hash_bucket_strong(tf.strings.upper(tf.strings.strip(
    tf.as_string(k))), 7, key=[1, 2])
ROWS@0: tf.strings.length(tf.strings.regex_replace(tf.as_string(k),
    tf.as_string(tf.constant(1)), "ab"))
ROWS@0: words_table().lookup(k)
ROWS@0: tf.quantization.fake_quant_with_min_max_args(x)
ROWS@0: tf.quantization.fake_quant_with_min_max_vars(x, -6.0, 6.0)
ROWS@0: tf.quantization.quantize_and_dequantize_v2(x, -6.0, 6.0, range_given=True)
ROWS@0: tf.math.polygamma(1.0, 1 + tf.abs(x)) + tf.bitcast(tf.bitcast(x, "int32"),
    "float32")
ROWS@0: tf.image.adjust_contrast(i, 2.0)
ROWS@0: tf.image.adjust_hue(i, 0.1)
ROWS@0: tf.raw_ops.AdjustSaturation(images=tf.sigmoid(i), scale=0.5)
ROWS@0: tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(tf.sigmoid(i)))
ROWS@0: tf.nn.depth_to_space(tf.nn.space_to_depth(tf.tile(i, [1, 1, 1, 4]), 2), 2)
ROWS@0: tf.image.extract_patches(i, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID")
ROWS@0: tf.image.resize(i, [4, 4], "area")
ROWS@0: tf.nn.lrn(i)
ROWS@0: moved_by(i, v)
ROWS@0: tf.nn.atrous_conv2d(i, tf.ones([2, 2, 3, 1]), 2, "SAME")
ROWS@0: tf.linalg.cross(i, tf.roll(i, 1, 3))
ROWS@0: tf.math.real(tf.signal.ifft(tf.signal.fft(tf.complex(x, y))))
ROWS@0: tf.signal.irfft(tf.signal.rfft(x)) + tf.signal.irfft2d(tf.signal.rfft2d(t))[:,
    0]
ROWS@0: tf.math.real(tf.signal.ifft2d(tf.signal.fft2d(tf.complex(t, t))))
OTHER joined: tf.abs(tf.signal.fft(tf.complex(tf.transpose(x), tf.transpose(y))))
ROWS@0: tf.linalg.cholesky(matrices(t))
OTHER joined *: tf.linalg.cholesky(tf.matmul(x, x, transpose_b=True))
ROWS@0: tf.linalg.inv(matrices(t)) + tf.linalg.sqrtm(matrices(t))
ROWS@0: tf.linalg.det(matrices(t)) + tf.linalg.slogdet(matrices(t))[1]
ROWS@0: tf.linalg.lu(matrices(t))[0] + tf.abs(tf.linalg.qr(matrices(t))[1])
ROWS@0: tf.linalg.solve(matrices(t), x[..., None]) + tf.linalg.lstsq(matrices(t),
    x[..., None])
ROWS@0: tf.raw_ops.MatrixSolveLs(matrix=matrices(t), rhs=x[..., None],
    l2_regularizer=tf.zeros([], tf.float64))
ROWS@0: tf.linalg.triangular_solve(matrices(t), x[..., None])
ROWS@0: tf.linalg.tridiagonal_solve(t[:, :3], x, diagonals_format="compact")
ROWS@0: tf.linalg.eigvalsh(matrices(t)) + tf.linalg.svd(t, compute_uv=False)[:, :1]
OTHER joined: tf.linalg.svd(x, compute_uv=False)
OTHER joined: tf.linalg.qr(x)[1]
UNKNOWN +rows *: tf.raw_ops.ReluGrad(gradients=x, features=x)
UNKNOWN *: tf.timestamp()
UNKNOWN +rows *: mean(x) * tf.cast(tf.timestamp(), tf.float32)
"""


def rows_of(table):
    """Pairs of an expression and what is expected."""
    rows = table.replace("\n    ", " ").strip().splitlines()
    return [(text, expected) for expected, _, text in (r.partition(": ") for r in rows)]


TABLES = {
    "sums and means": SUMS_AND_MEANS,
    "counts": COUNTS,
    "selections": SELECTIONS,
    "shapes": SHAPES,
    "contractions": CONTRACTIONS,
    "layers": LAYERS,
    "flows": FLOWS,
    "losses": LOSSES,
    "others": OTHERS,
}
TABLE = {
    f"{subject}: {expression}": (expression, expected)
    for subject, table in TABLES.items()
    for expression, expected in rows_of(table)
}
