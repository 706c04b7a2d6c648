"""Maps the values of an op's inputs to those of its outputs: one rule for each type.

A rule takes a `Node` and returns a value, or a list with one for each output. An op
that is not in `RULES` gets `unlisted`, which never causes a warning by itself.
"""

from __future__ import annotations

import tensorflow as tf

from tfdp.lint.arithmetic import (
    along_last,
    batch_matrix_product,
    batch_norm,
    by_rows,
    changed_in_place,
    check,
    cross_entropy,
    cumulated,
    dense_counts,
    einsum,
    function,
    matrix_product,
    other_reduction,
    plus,
    product,
    quotient,
    reduction,
    same,
    same_each,
    select,
    sign,
    softmax,
    squares,
    summed_in_place,
)
from tfdp.lint.axes import (
    best,
    broadcast,
    concatenated,
    diagonal,
    diagonal_matrix,
    filled,
    from_blocks,
    like_rows,
    numbered,
    one_hot,
    packed,
    padded,
    positions,
    rearranged,
    reordered,
    reshaped,
    shape_of,
    shapes_of,
    size_of,
    split,
    tiled,
    to_blocks,
    unique,
    unpacked,
    with_axis,
    without_axes,
)
from tfdp.lint.node import Node, Rule
from tfdp.lint.parts import cut, gathered, gathered_places, looked_up, sliced
from tfdp.lint.registry import key_of
from tfdp.lint.values import (
    CONSTANT,
    REPLICATED,
    SAME,
    UNKNOWN,
    ZERO,
    Term,
    Value,
    dependencies,
    joined,
    unknown,
)


def drawn(node: Node) -> Value:
    """Random numbers; without a seed, or with unlike ones, they differ by replica."""
    attributes = node.op.node_def.attr
    seeds = [attributes[name].i for name in ("seed", "seed2") if name in attributes]
    local = f"drawn by seed {seeds}" if any(seeds) else "drawn"
    return _of_shape(node).but(terms=REPLICATED.terms, local=frozenset({local}))


def _of_shape(node: Node) -> Value:
    shape = node.values[0] if node.values else ZERO
    return ZERO.but(axes=(shape.order[1],)) if shape.is_shape else ZERO  # type: ignore[index]


def drawn_from_seed(node: Node) -> Value:
    """Random numbers from a seed, an input."""
    local = frozenset().union(*(v.local for v in node.values)) - {"rows", "counts"}
    return _of_shape(node).but(terms=REPLICATED.terms, local=local)


def read(node: Node) -> Value:
    """A variable's value, with what is known of its handle."""
    handle = node.values[0]
    return REPLICATED.but(reads=handle.reads, local=handle.local)


def handle_on_cores(node: Node) -> Value:
    """TPUReplicatedInput: one handle for the variable's copies on all cores; or each
    core's own rows or numbers, which are like those of the first."""
    output = node.op.outputs[0]
    if output.dtype != tf.resource:
        return node.values[0]
    return REPLICATED.but(reads=frozenset({(key_of(output), SAME)}))


def listed(node: Node) -> Value:
    """TensorListFromTensor: entries along the first axis become elements."""
    value = node.values[0]
    return value.but(axes=tuple(axis - 1 for axis in value.axes))


def element(node: Node) -> Value:
    """TensorListGetItem, of rows an entry."""
    value = node.values[0]
    return value.but(axes=tuple(axis for axis in value.axes if axis >= 0))


def with_element(node: Node) -> Value:
    """TensorListSetItem, TensorListPushBack."""
    place = {"TensorListSetItem": 2, "TensorListPushBack": 1}[node.op.type]
    value = node.values[place]
    if Term.ROWS in value.terms and not value.axes:
        value = value.but(axes=(-1,))
    return joined([node.values[0], value])


def popped(node: Node) -> list[Value]:
    """TensorListPopBack: the list, and its last element."""
    return [node.values[0], element(node)]


def joined_list(node: Node) -> Value:
    """TensorListStack: the elements along a new first axis."""
    value = node.values[0]
    return value.but(axes=tuple(axis + 1 for axis in value.axes))


def empty(node: Node) -> Value:
    """A list without elements."""
    return ZERO


def constant(node: Node) -> Value:
    """Const: zero or another constant."""
    number = node.attribute("value")  # not as an array, which takes five times as long
    parts = [part for field, part in number.ListFields() if field.name.endswith("_val")]
    has_other = number.tensor_content.strip(b"\0") or any(map(any, parts))
    return CONSTANT if has_other or number.string_val else ZERO


def nothing_known(node: Node) -> Value:
    """An op whose outputs may be any function of its inputs."""
    return UNKNOWN.but(**dependencies(node.values))


def unlisted(node: Node) -> list[Value]:
    """The rule of an op without one."""
    if node.op.op_def.is_stateful:  # such as the time of day
        changing = unknown(node.values).but(terms=UNKNOWN.terms)
        return [changing] * len(node.op.outputs)
    telling = [
        place
        for place, value in enumerate(node.values)
        if value.is_of_own_rows or value.of_share
    ]
    count = len(node.op.outputs)
    is_loss = any(node.values[place].of_share for place in telling)
    is_number = any(output.dtype.is_floating for output in node.op.outputs)
    # Of words and places the op may be any function of each row; so may one of numbers,
    # but it may combine the rows as well.
    if len(telling) != 1 or (is_number and not is_loss):
        return [unknown(node.values).but(cross=frozenset())] * count
    [place] = telling
    value, rank = node.values[place], node.rank(place)
    results = []
    for output in node.op.outputs:
        is_kept = not value.axes or (
            output.shape.rank == rank
            or (value.axes == (0,) and output.shape.rank not in (None, 0))
        )
        # Of the rows' entries it may be any function; a loss keeps its kind.
        kept = value.but(**dependencies(node.values))
        if kept.is_shape:
            kept = kept.but(order=None, power=None)
        results.append(kept if is_kept else unknown(node.values))
    return results


def inner(count: int) -> Rule:
    """The rule of an op that combines entries along the last `count` axes."""
    return lambda node: along_last(node, count)


def words(text: str, rule: Rule) -> dict[str, Rule]:
    """A rule for each word of a text."""
    return dict.fromkeys(text.split(), rule)


RULES: dict[str, Rule] = {
    **words(
        "Bitcast Cast CheckNumerics EnsureShape Identity PlaceholderWithDefault", same
    ),
    **words("Conj Imag PreventGradient Real Snapshot StopGradient", same),
    "IdentityN": same_each,
    "Neg": same,
    **words("Add AddN AddV2 BiasAdd Sub", plus),
    **words("Mul MulNoNan", product),
    **words("Div DivNoNan RealDiv", quotient),
    **words(
        "Abs Acos Acosh Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 "
        "BesselI1e Ceil ClipByValue "
        "Cos Cosh Dawsn Digamma "
        "Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater "
        "GreaterEqual Igamma Igammac "
        "LeakyRelu Less LessEqual Lgamma Log Log1p "
        "LogicalAnd LogicalNot LogicalOr Maximum Minimum Ndtri NextAfter NotEqual "
        "Pow Reciprocal Relu "
        "Relu6 Rint Round Rsqrt Selu Sigmoid Sin Sinh Softplus Softsign Sqrt Square "
        "SquaredDifference Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy",
        function,
    ),
    # The same of integers, complex numbers, or with attributes.
    **words(
        "BitwiseAnd BitwiseOr BitwiseXor Bucketize Complex ComplexAbs "
        "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Invert Mod Polygamma "
        "QuantizeAndDequantizeV4 Zeta",
        lambda node: function(node),
    ),
    # The same of strings.
    **words(
        "AsString RegexReplace StaticRegexReplace StringJoin StringLength StringLower "
        "StringStrip StringToHashBucketFast StringToHashBucketStrong StringToNumber "
        "StringUpper Substr",
        lambda node: function(node),
    ),
    "LookupTableFindV2": lambda node: by_rows(node, linear=False, place=1),
    "Sign": sign,
    **words("IsFinite IsInf IsNan", check),
    **words("Select SelectV2", select),
    "Sum": lambda node: reduction(node, kind="sum"),
    "Mean": lambda node: reduction(node, kind="mean"),
    **words("All Any EuclideanNorm Max Min Prod", other_reduction),
    **words("ArgMax ArgMin", lambda node: reduction(node, kind="arg")),
    "L2Loss": squares,
    **words("LogSoftmax Softmax", softmax),
    **words("Cumprod Cumsum CumulativeLogsumexp", cumulated),
    **words("RandomShuffle ReverseV2 Roll", reordered),
    "TopKV2": best,
    "Transpose": rearranged,
    "ExpandDims": with_axis,
    "Squeeze": without_axes,
    "Reshape": reshaped,
    "Pack": packed,
    "Unpack": unpacked,
    "ConcatV2": concatenated,
    "Split": lambda node: split(node, 1, 0),
    "SplitV": lambda node: split(node, 0, 2),
    "Slice": cut,
    "StridedSlice": sliced,
    "Shape": shape_of,
    "ShapeN": shapes_of,
    "Size": size_of,
    "Rank": lambda node: CONSTANT,
    **words("OnesLike ZerosLike", like_rows),
    "Fill": filled,
    "Range": numbered,
    "Where": positions,
    "GatherV2": gathered,
    "GatherNd": gathered_places,
    "ResourceGather": looked_up,
    "OneHot": one_hot,
    "Tile": tiled,
    "SpaceToBatchND": to_blocks,
    "BatchToSpaceND": from_blocks,
    "BroadcastTo": broadcast,
    **words("MirrorPad Pad PadV2", padded),
    **words("DiagPart MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3", diagonal),
    **words("MatrixDiag MatrixDiagV2 MatrixDiagV3", diagonal_matrix),
    "MatMul": matrix_product,
    **words("BatchMatMul BatchMatMulV2 BatchMatMulV3", batch_matrix_product),
    "Einsum": einsum,
    **words(
        "AdjustContrastv2 AvgPool AvgPool3D Conv2D Conv3D DepthToSpace "
        "DepthwiseConv2dNative ExtractImagePatches ResizeArea ResizeBicubic "
        "ResizeBilinear ResizeNearestNeighbor SpaceToDepth",
        lambda node: by_rows(node, linear=True),
    ),
    **words(
        "Conv2DBackpropInput Conv3DBackpropInputV2",
        lambda node: by_rows(node, linear=True, place=2),
    ),
    **words(
        "AdjustHue AdjustSaturation HSVToRGB "
        "ImageProjectiveTransformV3 LRN MaxPool MaxPool3D MaxPoolV2 "
        "RGBToHSV",
        lambda node: by_rows(node, linear=False),
    ),
    **words("Cross FFT IFFT IRFFT RFFT", inner(1)),
    **words(
        "Cholesky FFT2D IFFT2D IRFFT2D LogMatrixDeterminant Lu "
        "MatrixDeterminant MatrixInverse MatrixSolve "
        "MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Qr RFFT2D "
        "SelfAdjointEigV2 Svd TridiagonalSolve",
        inner(2),
    ),
    "FusedBatchNormV3": batch_norm,
    "SparseSoftmaxCrossEntropyWithLogits": cross_entropy,
    "SoftmaxCrossEntropyWithLogits": cross_entropy,
    **words(
        "SegmentSum UnsortedSegmentSum", lambda node: summed_in_place(node, slice(1))
    ),
    "Bincount": lambda node: summed_in_place(node, slice(1)),
    "DenseBincount": dense_counts,
    "HistogramFixedWidth": lambda node: summed_in_place(node, slice(1)),
    "ScatterNd": lambda node: summed_in_place(node, slice(2)),
    **words("TensorScatterAdd TensorScatterSub TensorScatterUpdate", changed_in_place),
    **words("Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2", unique),
    **words(
        "Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 "
        "RandomStandardNormal RandomUniform RandomUniformInt RngReadAndSkip "
        "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform "
        "StatefulUniformInt TruncatedNormal",
        drawn,
    ),
    **words(
        "StatelessRandomGetAlg StatelessRandomGetKeyCounter StatelessRandomNormal "
        "StatelessRandomNormalV2 StatelessRandomUniform "
        "StatelessRandomUniformFullIntV2 StatelessRandomUniformInt "
        "StatelessRandomUniformIntV2 StatelessRandomUniformV2 "
        "StatelessTruncatedNormal StatelessTruncatedNormalV2",
        drawn_from_seed,
    ),
    "ReadVariableOp": read,
    "TPUReplicatedInput": handle_on_cores,
    "TensorListFromTensor": listed,
    **words("TensorListReserve EmptyTensorList", empty),
    "TensorListGetItem": element,
    **words("TensorListSetItem TensorListPushBack", with_element),
    "TensorListPopBack": popped,
    "TensorListStack": joined_list,
    "Const": constant,
    **words("IteratorGetNext EagerPyFunc PyFunc PyFuncStateless", nothing_known),
}
