"""Losses in which the rows of a batch see each other, as papers define them."""

import keras

ops = keras.ops

#: The width of a row's two views, or of a query and of its candidate.
VIEW = 4


def views(p):
    return p[:, :VIEW], p[:, VIEW : 2 * VIEW]


def unit(z):
    return z / ops.sqrt(ops.sum(ops.square(z), axis=-1, keepdims=True) + 1e-6)


def each_of_its_own(scores):
    """The cross-entropy of each row of `scores`, with its own column as label."""
    log = scores - ops.logsumexp(scores, axis=1, keepdims=True)
    return -ops.diagonal(log)


def info_nce(y, p):
    """Van den Oord et al. 2018, in both directions as in CLIP: a number per row."""
    a, b = map(unit, views(p))
    scores = ops.matmul(a, ops.transpose(b)) / 0.3
    return each_of_its_own(scores) + each_of_its_own(ops.transpose(scores))


def siglip(y, p):
    """Zhai et al. 2023: each pair by itself, a number per row."""
    a, b = map(unit, views(p))
    scores = 5.0 * ops.matmul(a, ops.transpose(b)) - 2.0
    signs = 2.0 * ops.eye(ops.shape(p)[0], dtype=p.dtype) - 1.0
    return ops.sum(ops.softplus(-signs * scores), axis=1)


def hard_triplets(y, p):
    """Hermans et al. 2017: the farthest of its class and the nearest of another."""
    y = ops.reshape(y, (-1, 1))
    same = ops.cast(ops.equal(y, ops.transpose(y)), p.dtype)
    squares = ops.sum(ops.square(p[:, None] - p[None]), axis=-1)
    distances = ops.sqrt(squares + 1e-3)
    farthest = ops.max(distances * same, axis=1)
    nearest = ops.min(distances + 1e3 * same, axis=1)
    return ops.softplus(farthest - ops.minimum(nearest, 20.0))


def targets(y, p):
    return ops.cast(ops.equal(ops.reshape(y, (-1, 1)), ops.arange(VIEW)), p.dtype)


def batch_dice(y, p):
    """Milletari et al. 2016, of the whole batch: one number."""
    t, q = targets(y, p), ops.sigmoid(p[:, :VIEW])
    both = 2 * ops.sum(t * q) + 1
    return 1 - both / (ops.sum(t * t) + ops.sum(q * q) + 1)


def batch_f1(y, p):
    """Benedict et al. 2021 (sigmoidF1): the mean over classes of a batch's F1."""
    t, q = targets(y, p), ops.sigmoid(p[:, :VIEW])
    hits = ops.sum(t * q, axis=0)
    return 1 - ops.mean(2 * hits / (ops.sum(t, axis=0) + ops.sum(q, axis=0) + 0.1))


def normalized(z):
    centred = z - ops.mean(z, axis=0)
    return centred / ops.sqrt(ops.mean(ops.square(centred), axis=0) + 0.05)


def barlow_twins(y, p):
    """Zbontar et al. 2021: the correlations of features over the batch."""
    a, b = map(normalized, views(p))
    rows = ops.cast(ops.shape(p)[0], p.dtype)
    correlations = ops.matmul(ops.transpose(a), b) / rows
    weights = 0.1 + 0.9 * ops.eye(VIEW, dtype=p.dtype)
    return ops.sum(weights * ops.square(ops.eye(VIEW, dtype=p.dtype) - correlations))


def vicreg(y, p):
    """Bardes et al. 2022: invariance, variance and covariance of the batch."""
    a, b = views(p)
    loss = 5.0 * ops.mean(ops.square(a - b))
    for z in (a, b):
        centred = z - ops.mean(z, axis=0)
        deviation = ops.sqrt(ops.mean(ops.square(centred), axis=0) + 1e-2)
        loss += 5.0 * ops.mean(ops.relu(1 - deviation))
        rows = ops.cast(ops.shape(p)[0], p.dtype)
        covariance = ops.matmul(ops.transpose(centred), centred) / rows
        others = 1 - ops.eye(VIEW, dtype=p.dtype)
        loss += ops.sum(others * ops.square(covariance)) / VIEW
    return loss


def corrected_softmax(y, p):
    """Yi et al. 2019: candidates of a batch, corrected by their frequency."""
    queries, candidates = views(p)
    frequency = 0.1 + 0.2 * ops.cast(ops.reshape(y, (1, -1)), p.dtype)
    scores = ops.matmul(queries, ops.transpose(candidates)) - ops.log(frequency)
    return each_of_its_own(scores)


def listwise(y, p):
    """Cao et al. 2007 (ListNet): the batch is the list."""
    wanted = ops.softmax(ops.cast(ops.reshape(y, (-1,)), p.dtype))
    scores = p[:, 0]
    return -ops.sum(wanted * (scores - ops.logsumexp(scores)))


LOSSES = {
    "InfoNCE": info_nce,
    "SigLIP": siglip,
    "triplets": hard_triplets,
    "Dice": batch_dice,
    "F1": batch_f1,
    "Barlow Twins": barlow_twins,
    "VICReg": vicreg,
    "corrected softmax": corrected_softmax,
    "listwise": listwise,
}
#: Those with a number for each row, which sample weights can weight.
OF_ROWS = ("InfoNCE", "SigLIP", "triplets", "corrected softmax")
