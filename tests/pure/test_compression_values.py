"""Communication(compression=...): what is refused when it is made. No TensorFlow."""

import dataclasses

import pytest

from tfdp.errors import ConfigurationError
from tfdp.plan.communication import Communication
from tfdp.plan.compression import Compression
from tfdp.plan.options import Given, fields_of, refuse_options


@dataclasses.dataclass(frozen=True)
class Other(Compression):
    level: int = 1


@dataclasses.dataclass(frozen=True)
class Rounding(Compression):
    @property
    def wire_dtype(self):
        return "bfloat16"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"error_feedback": 1}, "error_feedback must be True or False"),
        ({"one_dimensional": "no"}, "one_dimensional must be True or False"),
        ({"min_bytes": -1}, "min_bytes must be an integer of at least 0"),
        ({"min_bytes": True}, "min_bytes must be an integer"),
        ({"exclude": "bias"}, "list of regular expressions"),
        ({"exclude": ["("]}, "valid regular expressions"),
    ],
)
def test_what_all_methods_refuse(options, words):
    with pytest.raises(ConfigurationError, match=words):
        Other(**options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"compression": "int8"}, r"tfdp\.compression\.Int8\(\).*Received: 'int8'"),
        ({"compression": Other}, r"call it: Other\(\)"),
        ({"compression": Other(), "compression_across": "racks"}, "'hosts' or"),
        ({"compression_across": "replicas"}, "Give a method"),
        ({"compression": Other(), "wire_dtype": "bfloat16"}, "Leave one of them"),
    ],
)
def test_what_communication_refuses(options, words):
    with pytest.raises(ConfigurationError, match=words):
        Communication(**options)


def test_a_link_rounds_all_gradients_alike():
    communication = Communication(compression=Rounding(min_bytes=5))
    with pytest.raises(ConfigurationError, match="rounds every gradient"):
        refuse_options(Given(hosts=2, values=fields_of(communication)))


def test_what_a_link_does_itself():
    assert Communication(compression=Rounding()).link_dtype == "bfloat16"
    assert Communication(wire_dtype="float16").link_dtype == "float16"
    assert Communication(compression=Other()).link_dtype is None
    across = {"compression": Rounding(), "compression_across": "replicas"}
    assert Communication(**across).link_dtype is None


def test_values_are_hashable_and_equal_by_what_they_say():
    assert Other(exclude=["a"]) == Other(exclude=("a",))
    assert hash(Other(exclude=["a"])) == hash(Other(exclude=("a",)))
    assert Other(level=2) != Other()


def test_a_config_is_what_json_holds():
    assert Other(exclude=["a"], level=3).get_config() == {
        "method": "Other",
        "error_feedback": True,
        "min_bytes": 4096,
        "exclude": ["a"],
        "one_dimensional": False,
        "level": 3,
    }
