"""docs/options.md, row by row: where each option works, and where it is refused."""

import inspect
import re
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.package_source import REPOSITORY
from tests.support.stand_in_link import StandInLink
from tests.support.stand_in_living import StandInLivingHosts
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.errors import ConfigurationError
from tfdp.plan import options
from tfdp.plan.shards import sharding_of
from tfdp.strategies import auto, connect_hosts, multi_host

PAGE = (REPOSITORY / "docs" / "options.md").read_text("utf-8")
ROW = re.compile(r"^\| `(\w+=.*?)` \| (.*) \|$", re.MULTILINE)
WORDS = {"works", "bound", "refused", "no effect", "-"}


def one_process(**options):
    return tfdp.DataParallelStrategy(**{"devices": ["CPU:0", "CPU:1"], **options})


def hosts(workers):
    def make(**options):
        cluster = tfdp.Cluster(workers=workers, rank=0, coordinator="127.0.0.1:1")
        return tfdp.MultiHostDataParallelStrategy(
            cluster, **{"devices_per_host": 2, **options}
        )

    return make


def tpu(**options):
    return StandInStrategy(2, **options)


def auto_on_one_host(**options):
    return tfdp.auto_strategy(**{"devices_per_host": 2, **options})


COLUMNS = {
    "one": one_process,
    "several": hosts(2),
    "one of": hosts(1),
    "tpu": tpu,
    "auto": auto_on_one_host,
}
ROWS = [(row[1], row[2].split(" | ")) for row in ROW.finditer(PAGE)]
CELLS = [
    pytest.param(arguments, column, word, id=f"{arguments}-{column}-{word}")
    for arguments, words in ROWS
    for column, word in zip(COLUMNS, words, strict=True)
]


def evaluated(arguments, replicas=2):
    methods = {name: getattr(tfdp.compression, name) for name in ("Cast", "Int8")}
    names = {"Communication": tfdp.Communication, "Sharding": tfdp.Sharding, **methods}
    # As many devices as the strategy has replicas, on all its hosts.
    devices = [f"cpu:{rank}" for rank in range(replicas)]
    names["mesh"] = keras.distribution.DeviceMesh(
        (1 if replicas == 2 else 2, 2), ["data", "model"], devices
    )
    names["LayoutMap"] = keras.distribution.LayoutMap
    return eval(f"dict({arguments})", names)  # written in our own page


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """Workers of their own: the others are this one, as far as the link tells."""
    monkeypatch.setattr(connect_hosts, "make_link", StandInLink)
    monkeypatch.setattr(connect_hosts, "rendezvous_by_collectives", lambda link: None)
    monkeypatch.setattr(multi_host, "join_elastic_hosts", StandInLivingHosts)
    monkeypatch.setattr(multi_host, "use_virtual_devices", lambda count: None)
    monkeypatch.setattr(
        auto, "use_virtual_devices", lambda count: [f"CPU:{n}" for n in range(count)]
    )
    monkeypatch.setattr(multi_host.atexit, "register", lambda function: None)


@pytest.mark.parametrize("arguments, column, word", CELLS)
def test_every_cell(arguments, column, word):
    assert word in WORDS
    given = evaluated(arguments, 4 if column == "several" else 2)
    make = COLUMNS[column]
    if word == "-":
        with pytest.raises(TypeError, match="unexpected keyword"):
            make(**given)
    elif word == "refused":
        with pytest.raises(ConfigurationError):
            make(**given)
    else:
        strategy = make(**given)
        assert strategy.num_replicas_in_sync >= 2
        assert bool(strategy.idle_lines) == (word == "no effect")


# By column, who makes the strategy, and on how many hosts.
MAKERS = {
    "one": (options.ONE, 1),
    "several": (options.HOSTS, 2),
    "one of": (options.HOSTS, 1),
    "tpu": (options.TPU, 1),
    "auto": (options.AUTO, 1),
}


def word_of(arguments, maker, hosts):
    """What the registry says of these arguments."""
    given = evaluated(arguments)
    if any(maker not in options.OPTIONS[name].makers for name in given):
        return "-"
    sharding = {
        name: given.pop(argument)
        for argument, name in (
            ("shard_group", "group"),
            ("shard_min_bytes", "min_bytes"),
            ("offload", "offload"),
        )
        if argument in given
    }
    try:
        sharding = sharding_of(given.pop("shard", "none"), **sharding)
        communication = given.pop("communication", tfdp.Communication())
        values = options.options_of(communication, sharding, **given)
        all_given = rest = options.Given(maker, hosts, values, devices=2)
        idle = {}
        if maker == options.AUTO:
            rest, idle = options.without_idle_options(all_given)
        options.refuse_options(rest)
    except ConfigurationError:
        return "refused"
    if idle:
        return "no effect"
    bounds = [
        options.OPTIONS[name].is_bound and (hosts == 1 or name == "shard_min_bytes")
        for name in values
        if all_given.has(name)
    ]
    return "bound" if bounds and all(bounds) else "works"


@pytest.mark.parametrize("arguments, words", ROWS)
def test_the_registry_says_what_the_page_says(arguments, words):
    found = [word_of(arguments, *MAKERS[column]) for column in COLUMNS]
    assert found == words


def test_the_table_has_every_option():
    text = " ".join(arguments for arguments, _ in ROWS)
    # Which devices, and which workers, is no option of how; `sync` is the optimizer's.
    rest = {"cluster", "tpu", "cpu_devices"}
    rest |= {name for name in options.OPTIONS if name.startswith("sync")}
    for name in set(options.OPTIONS) - rest:
        assert f"{name.rpartition('.')[2]}=" in text, name


CLASSES = {
    options.ONE: tfdp.DataParallelStrategy,
    options.HOSTS: tfdp.MultiHostDataParallelStrategy,
    options.TPU: tfdp.TPUDataParallelStrategy,
    options.AUTO: tfdp.auto_strategy,
}


def defaults_of(made):
    """The default of each argument, in the order of the signature."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(made).parameters.items()
    }


def described(made):
    """The text of each argument in `Args` of the docstring, in its order."""
    args = inspect.getdoc(made).partition("Args:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^  (\w+): ", args, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("maker", CLASSES)
def test_signatures_are_those_of_the_registry(maker):
    found = defaults_of(CLASSES[maker])
    assert found == {
        name: option.default
        for name, option in options.OPTIONS.items()
        if maker in option.makers and "." not in name
    }
    assert list(described(CLASSES[maker])) == list(found)


def test_the_fields_of_communication_are_those_of_the_registry():
    found = {
        f"Communication.{k}": v for k, v in defaults_of(tfdp.Communication).items()
    }
    assert found == {
        name: option.default
        for name, option in options.OPTIONS.items()
        if name.startswith("Communication.")
    }
    assert list(described(tfdp.Communication)) == list(defaults_of(tfdp.Communication))


def test_the_types_of_communication_are_those_of_the_registry():
    for name, hint in typing.get_type_hints(tfdp.Communication).items():
        values = options.OPTIONS[f"Communication.{name}"].values.values
        parts = [part for part in typing.get_args(hint) if typing.get_args(part)]
        literals = parts or [hint] if "Literal" in str(hint) else []
        stated = [v for each in literals for v in typing.get_args(each) if v is not int]
        texts = [value for value in values if isinstance(value, str)]
        assert name == "hierarchy" or stated == texts, name


def test_the_fields_of_a_sharding_are_those_of_the_registry():
    found = [*defaults_of(tfdp.Sharding).values()]
    names = ("shard", "shard_group", "shard_min_bytes", "offload")
    assert found == [options.OPTIONS[name].default for name in names]


@pytest.mark.parametrize("maker", CLASSES)
def test_an_option_is_described_once(maker):
    """Or again where it differs."""
    texts = described(tfdp.auto_strategy)
    for name, text in described(CLASSES[maker]).items():
        assert maker == options.AUTO or text != texts.get(name)
        assert re.match(r"(?:see `(\w+)`)?", text)[1] in (None, options.AUTO)


def test_each_value_of_an_option_is_described():
    texts = {f"Communication.{k}": v for k, v in described(tfdp.Communication).items()}
    texts |= described(tfdp.auto_strategy)
    for name in texts:
        for value in options.OPTIONS[name].values.values:
            assert not isinstance(value, str) or f'"{value}"' in texts[name], name


def test_each_limit_is_one_of_an_option():
    for limits in options.LIMITS.values():
        assert set(limits) <= set(options.OPTIONS)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"engine": "sockets"}, "engine='sockets'.*on one host: it carries sums"),
        ({"wire_dtype": "float16"}, "wire_dtype='float16'.*on one host"),
    ],
)
@pytest.mark.parametrize(
    "make", [tfdp.DataParallelStrategy, tfdp.HierarchicalAllReduce]
)
def test_the_refusal_says_why(make, options, words):
    with pytest.raises(ConfigurationError, match=words):
        make(communication=tfdp.Communication(**options))


def test_fewer_gpus_than_asked_for_are_no_smaller_training(monkeypatch):
    gpu = "/job:localhost/replica:0/task:0/device:GPU:0"
    monkeypatch.setattr(
        multi_host.tf.config, "list_physical_devices", lambda kind=None: [gpu]
    )
    monkeypatch.setattr(multi_host, "find_devices", lambda: (gpu,))
    with pytest.raises(tfdp.errors.DeviceError, match="=2, but this host has 1: .*GPU"):
        hosts(1)(devices_per_host=2)


ALIKE = [
    ({"shard_min_bytes": 1}, "shard_min_bytes is 1 on worker 0, 32768 on worker 1"),
    ({"draws_per_replica": False}, "draws_per_replica is False on worker 0, True on"),
    (
        {"communication": tfdp.Communication(timeout_seconds=7)},
        "Communication.timeout_seconds is 7 on worker 0, 600.0 on worker 1",
    ),
]


@pytest.mark.parametrize("options, words", ALIKE)
def test_another_option_on_one_worker_is_named(monkeypatch, options, words):
    other = hosts(2)()._group.link.settings
    monkeypatch.setattr(StandInLink, "settings_of_others", other)
    hosts(2)()
    with pytest.raises(ConfigurationError, match=words):
        hosts(2)(**options)


def test_another_dtype_policy_on_one_worker_is_named(monkeypatch):
    other = hosts(2)()._group.link.settings
    monkeypatch.setattr(StandInLink, "settings_of_others", other)
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(
        ConfigurationError, match="is 'mixed_float16' on worker 0, 'float32' on"
    ):
        hosts(2)()


def test_settings_of_another_engine_are_named(monkeypatch):
    monkeypatch.setattr(StandInLink, "settings_of_others", b"23456")
    with pytest.raises(ConfigurationError, match="Worker 1 has another Communication"):
        hosts(2)()


LAUNCHERS = {
    "tfdp": {"TFDP_WORKERS": "2", "TFDP_RANK": "1", "TFDP_COORDINATOR": "h:1"},
    "TF_CONFIG": {
        "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, '
        '"task": {"type": "worker", "index": 1}}'
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_of_several_workers_does_not_train_alone(monkeypatch, launcher):
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigurationError, match=rf"worker 1 of 2 \({launcher}\).*auto_strategy"
    ):
        tfdp.DataParallelStrategy()
    assert tfdp.DataParallelStrategy(alone=True).num_replicas_in_sync == 4


@pytest.mark.parametrize(
    "variables",
    [
        # One worker; and a cluster that nobody knows whole.
        {"TFDP_WORKERS": "1", "TFDP_RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "2"},
    ],
)
def test_a_lone_process_does(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tfdp.DataParallelStrategy().num_replicas_in_sync == 4


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "float16", "float32"])
def test_an_eager_sum_keeps_its_type(dtype):
    strategy = hosts(2)()
    values = [np.array([3, 5], dtype), np.array([4, 7], dtype)]

    def step():
        context = tf.distribute.get_replica_context()
        mine = tf.stack(values)[context.replica_id_in_sync_group]
        return context.all_reduce("SUM", mine)

    for total in strategy.experimental_local_results(strategy.run(step)):
        assert total.dtype == dtype
        # The stand-in's other host has what this one has.
        np.testing.assert_array_equal(total, np.array([14, 24], dtype))


def test_an_eager_sum_of_booleans_is_refused():
    def step():
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(True))

    with pytest.raises(tfdp.errors.CollectiveError, match="booleans to int32"):
        hosts(2)().run(step)
