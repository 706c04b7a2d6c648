"""Features: what is inferred from an example, and what is refused."""

import numpy as np
import pytest

from tfdp.data.features import FeatureSpec, as_array, check_example, infer_features
from tfdp.errors import ConfigurationError, DataError


@pytest.mark.parametrize(
    ("value", "shape", "dtype", "encoding"),
    [
        (3, (), "int64", "int64_list"),
        (True, (), "bool", "int64_list"),
        (0.5, (), "float32", "float_list"),
        (np.float64(0.5), (), "float64", "raw_bytes"),
        (np.uint8(7), (), "uint8", "int64_list"),
        (np.uint64(2**63), (), "uint64", "raw_bytes"),
        (np.zeros((2, 3), np.uint8), (2, 3), "uint8", "raw_bytes"),
        (np.zeros((4,), np.float32), (4,), "float32", "float_list"),
        (np.zeros((4,), np.int64), (4,), "int64", "int64_list"),
        (np.zeros((4,), np.float16), (4,), "float16", "raw_bytes"),
        ("text", (), "string", "bytes_list"),
        (b"bytes", (), "string", "bytes_list"),
        (["a", "bc"], (2,), "string", "bytes_list"),
    ],
)
def test_a_feature_is_inferred_with_its_exact_dtype(value, shape, dtype, encoding):
    features = infer_features({"x": value})
    assert features == {"x": FeatureSpec(shape, dtype, encoding)}


@pytest.mark.parametrize(
    "value", [b"ends in zero\0", [b"a\0", b"bc"], np.array([b"\0", b""], object)]
)
def test_bytes_keep_their_trailing_zeros(value):
    expected = value if not isinstance(value, bytes) else [value]
    assert list(as_array(value).reshape(-1)) == list(expected)


def test_a_given_feature_takes_the_place_of_the_inferred_one():
    given = {"tokens": FeatureSpec((None,), "int64")}
    example = {"tokens": np.arange(3), "label": 1}
    features = infer_features(example, given)
    assert features["tokens"].varies
    assert not features["label"].varies
    check_example({"tokens": np.arange(9), "label": 2}, features, 1)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"x": np.zeros((2, 4), np.uint8)}, r"example 17: .*'x' is uint8 .*\(2, 4\)"),
        ({"x": np.zeros((2, 3), np.int16)}, r"example 17: .*'x' is int16"),
        ({"x": np.zeros((2, 3, 1), np.uint8)}, r"example 17: .*\(2, 3, 1\)"),
        ({"y": np.zeros((2, 3), np.uint8)}, r"example 17 .*\['y'\].*\['x'\]"),
        ({}, "example 17"),
        ([1, 2], "example 17 is a list"),
        ({"x": [[1, 2], [3]]}, "example 17: feature 'x'"),
        ({"x": object()}, "example 17: feature 'x'.*object"),
    ],
)
def test_an_example_unlike_the_first_is_refused_with_its_number(example, message):
    features = infer_features({"x": np.zeros((2, 3), np.uint8)})
    with pytest.raises(DataError, match=message):
        check_example(example, features, 17)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "non-empty dict"),
        ({"x": np.array("2020-01-01", "datetime64[D]")}, "datetime64"),
        ({"x": {"nested": 1}}, "'x'"),
    ],
)
def test_a_first_example_that_cannot_be_stored_is_refused(example, message):
    with pytest.raises(DataError, match=message):
        infer_features(example)


def test_a_declared_feature_must_be_there():
    with pytest.raises(DataError, match="tokens"):
        infer_features({"x": 1}, {"tokens": FeatureSpec((None,), "int64")})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2,), "float8"), "float8"),
        (((-1,), "float32"), "-1"),
        (((2.0,), "float32"), "whole number"),
        (((None, 0), "float32"), "length of 0"),
        (((2,), "string", "raw_bytes"), "bytes_list"),
        (((2,), "float64", "float_list"), "raw_bytes"),
    ],
)
def test_a_wrong_feature_spec_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FeatureSpec(*arguments)
