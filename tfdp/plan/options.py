"""All options of the strategies in one table: values, defaults, and where each can act.

`OPTIONS` has the options, `LIMITS` where they cannot act. `refuse_options` refuses such
options, and `without_idle_options` finds those that `auto_strategy` leaves out.
docs/options.md shows combinations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdp.checks import did_you_mean, is_number, is_whole, what_it_is
from tfdp.errors import ConfigurationError
from tfdp.plan.compression import CAST_DTYPES, Compression

ACROSS = ("hosts", "replicas")
#: The values of `shard=`; the index is the ZeRO stage.
SHARD_STAGES = ("none", "optimizer", "gradients", "parameters")
# Makers of strategies.
ONE, HOSTS = "DataParallelStrategy", "MultiHostDataParallelStrategy"
TPU, AUTO = "TPUDataParallelStrategy", "auto_strategy"
STOCK, PLAN = "HierarchicalAllReduce", "tfdp plan"
ALL_MAKERS = (ONE, HOSTS, TPU, AUTO)


@dataclasses.dataclass(frozen=True)
class Values:
    """The values that an option can have: in words, as a test, and all if few."""

    words: str
    fits: Callable[[Any], bool]
    values: tuple[Any, ...] = ()


def _one_of(*values: Any, words: str = "") -> Values:
    # 1 is not True.
    kinds = [(type(value), value) for value in values]
    words = words or " or ".join(map(repr, values))
    return Values(words, lambda value: (type(value), value) in kinds, values)


def _whole(least: int, *, or_none: bool = False) -> Values:
    return Values(
        f"{'None or ' * or_none}an integer of at least {least}",
        lambda value: (or_none and value is None) or is_whole(value, least=least),
    )


def _seconds(least: float, words: str) -> Values:
    return Values(
        f"a finite number {words}",
        lambda value: is_number(value) and 0 < value < float("inf") and value >= least,
    )


def _is_hierarchy(value: Any) -> bool:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return all(is_whole(number, least=1) for number in value)
    return value in ("auto", "flat")


ANY = Values("anything", lambda value: True)
SWITCH = _one_of(True, False)
STAGE = Values(
    f"one of {', '.join(map(repr, SHARD_STAGES))}, or the ZeRO stage 0 to 3",
    lambda value: value in SHARD_STAGES or is_whole(value, 0, len(SHARD_STAGES) - 1),
    SHARD_STAGES,
)
HIERARCHY = Values(
    "'auto', 'flat' or a pair (hosts, devices_per_host) of integers of at least 1",
    _is_hierarchy,
)
METHOD = Values(
    "None or a value of tfdp.compression, such as tfdp.compression.Int8()",
    lambda value: value is None or isinstance(value, Compression),
)
PADDING = Values(
    "True, False, the global batch size (at least 1), or None (padding on a TPU only)",
    lambda value: value is None or isinstance(value, bool) or is_whole(value, least=1),
)
LAYOUT = Values(
    "None, or a LayoutMap or ModelParallel of keras.distribution",
    lambda value: value is None or hasattr(value, "device_mesh"),
)
TPU_TYPE = _one_of(
    None, "bfloat16", words="None or 'bfloat16': TPU cores add no smaller floats"
)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: its default, its values, and the strategies that take it.

    `is_bound`: whether it only bounds, and is accepted where nothing reaches it: on one
    host, or without shards.
    """

    name: str
    default: Any
    values: Values
    makers: tuple[str, ...] = ALL_MAKERS
    is_bound: bool = False

    def check(self, value: Any) -> None:
        """Raises ConfigurationError unless the option can have this value."""
        if not self.values.fits(value):
            texts = [each for each in self.values.values if isinstance(each, str)]
            raise ConfigurationError(
                f"{self.name} must be {self.values.words}. Received: "
                f"{what_it_is(value)}."
                f"{did_you_mean(value, texts)}"
            )


_bound = functools.partial(Option, is_bound=True)
_ENGINES = _one_of("auto", "in_process", "tensorflow", "sockets", "mpi")
OPTIONS = {
    option.name: option
    for option in (
        _bound("Communication.bucket_bytes", 25 << 20, _whole(1)),
        _bound("Communication.first_bucket_bytes", 1 << 20, _whole(1)),
        Option("Communication.hierarchy", "auto", HIERARCHY),
        Option("Communication.engine", "auto", _ENGINES),
        _bound("Communication.timeout_seconds", 600.0, _seconds(0.0, "above 0")),
        _bound("Communication.silence_seconds", 15.0, _seconds(2.0, "of at least 2")),
        Option("Communication.wire_dtype", None, _one_of(None, *CAST_DTYPES)),
        Option("Communication.compression", None, METHOD),
        Option("Communication.compression_across", "hosts", _one_of(*ACROSS)),
        Option("Communication.repeated_rows", "auto", _one_of("auto", "sum")),
        Option("Communication.min_hosts", None, _whole(1, or_none=True)),
        Option("Communication.checksum", False, SWITCH),
        _bound("Communication.compare_hosts", True, SWITCH),
        Option("communication", None, ANY),
        Option("shard", "none", STAGE),
        Option("shard_group", "all", _one_of("all", "host"), (HOSTS, AUTO)),
        _bound("shard_min_bytes", 32 * 1024, _whole(0)),
        Option("offload", "none", _one_of("none", "optimizer"), (ONE, HOSTS, AUTO)),
        Option("layout", None, LAYOUT, (ONE, HOSTS, AUTO)),
        Option("draws_per_replica", True, SWITCH),
        Option("pad_batches", None, PADDING, (ONE, TPU, AUTO)),
        Option("wire_dtype", None, TPU_TYPE, (TPU, AUTO)),
        Option("balance", None, _one_of(None, "speed"), (HOSTS, AUTO)),
        Option("devices_per_host", None, _whole(1, or_none=True), (HOSTS, AUTO)),
        Option("cpu_devices", None, _whole(1, or_none=True), (AUTO,)),
        Option("devices", None, ANY, (ONE,)),
        Option("cluster", None, ANY, (HOSTS,)),
        Option("tpu", "local", ANY, (TPU,)),
        Option("alone", False, SWITCH, (ONE,)),
        # Of `DistributedOptimizer`, and of the values of `tfdp.sync`.
        Option("sync", None, ANY, ()),
        Option("sync.across", "hosts", ANY, ()),
        Option("sync.start_step", 0, ANY, ()),
        Option("sync.fragments", 1, ANY, ()),
        Option("sync.overlap_steps", 0, ANY, ()),
        Option("sync.mixing", None, ANY, ()),
        Option("sync.compression", None, ANY, ()),
        Option("sync.quorum", None, ANY, ()),
        Option("sync.spare", 0, ANY, ()),
    )
}


@dataclasses.dataclass(frozen=True)
class Given:
    """The options that a strategy is given, by name, and where it trains.

    Args:
      maker: the class or function that makes the strategy, such as ONE; "": none yet.
      hosts: the number of processes; 0: not known yet.
      values: options by name, such as "shard" or "Communication.engine"; others have
        their defaults.
      devices: replicas of this process; 0: not known yet.
    """

    maker: str = ""
    hosts: int = 0
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    devices: int = 0

    def __getitem__(self, name: str) -> Any:
        default = OPTIONS[name].default
        if name.startswith("sync."):
            return getattr(self["sync"], name.removeprefix("sync."), default)
        return self.values.get(name, default)

    def has(self, name: str) -> bool:
        """Whether the option has another value than its default."""
        value, default = self[name], OPTIONS[name].default
        # 0 is not False.
        return type(value) is not type(default) or value != default

    def replace(self, **values: Any) -> Given:
        """The same with other values of options."""
        return dataclasses.replace(self, values={**self.values, **values})

    @property
    def is_rounded(self) -> bool:
        """Whether a compression is done by the links between hosts, which round."""
        method = self["Communication.compression"]
        is_cast = method is not None and method.wire_dtype is not None
        is_between = self["Communication.compression_across"] == "hosts"
        return self.hosts > 1 and is_between and is_cast

    @property
    def compresses_within(self) -> bool:
        """Whether replicas, or simulated hosts, of one process compress."""
        levels = self["Communication.hierarchy"]
        is_simulated = isinstance(levels, tuple) and levels[0] > 1
        return is_simulated or self["Communication.compression_across"] == "replicas"

    @property
    def has_shards_of_all(self) -> bool:
        """Whether the replicas of all hosts share the shards."""
        return self.hosts > 1 and self.has("shard") and self["shard_group"] == "all"

    def in_words(self) -> tuple[str, ...]:
        """The options that describe a strategy, as in ("shard gradients",)."""
        shard = (f"shard {self['shard']}",) if self.has("shard") else ()
        return ("weights in parts by layout=", *shard) if self.has("layout") else shard

    @property
    def has_idle_shards(self) -> bool:
        """Whether the replicas of a host share shards, and there is only one."""
        is_alone = self.hosts > 1 and self.devices == 1 and self.has("shard")
        return is_alone and not self.has("offload")


@dataclasses.dataclass(frozen=True)
class Where:
    """Hardware, or another option, with which some options cannot act."""

    words: str
    holds: Callable[[Given], bool]
    #: The name of that other option.
    option: str = ""

    def describe(self, given: Given) -> str:
        """The words, with the values of `given`."""
        if self.option:
            return f"with {_shown(self.option, given)}{self.words}"
        return self.words.format(given.hosts)


def _with(
    option: str, holds: Callable[[Given], bool] = lambda given: True, words: str = ""
) -> Where:
    return Where(words, lambda given: given.has(option) and holds(given), option)


@dataclasses.dataclass(frozen=True)
class Limit:
    """Why an option cannot act somewhere, and the values with which it can.

    `values`: None: the default only. `advice`: ends the refusal; "": by the values.
    `is_left_out`: whether `auto_strategy` leaves the option out instead.
    """

    why: str
    values: tuple[Any, ...] | Callable[[Given], tuple[Any, ...]] | None = None
    advice: str = ""
    is_left_out: bool = False


_idle = functools.partial(Limit, is_left_out=True)
_LOCKSTEP = "the cores run one program, in lockstep"
_LINKS = "the cores' links are faster than any encoding"
_WITHOUT_LATE_HOSTS = Limit(
    "training goes on without late hosts, which needs several hosts that may come back",
    advice="Give it to a tfdp.MultiHostDataParallelStrategy, or leave this out.",
)
_OWN_TYPE = "it pushes gradients in the type of the weights"
_NO_GRADIENTS = "no gradients cross hosts"
# By place or option, the options that cannot act there; a text: with no other value
# than the default.
LIMITS: dict[Where, dict[str, Limit | str]] = {
    Where("on a TPU", lambda given: given.maker == TPU): {
        "Communication.bucket_bytes": "XLA packs neighbouring sums by itself (its "
        "all-reduce combiner)",
        "Communication.first_bucket_bytes": "XLA starts each sum as soon as its inputs "
        "are there",
        "Communication.hierarchy": "XLA uses the links between the cores",
        "Communication.engine": "the sum is an op of the program that XLA compiles for "
        "all cores",
        "Communication.timeout_seconds": _idle(_LOCKSTEP),
        "Communication.silence_seconds": _idle(_LOCKSTEP),
        "Communication.min_hosts": _LOCKSTEP,
        "Communication.compare_hosts": _idle(_LOCKSTEP),
        "Communication.wire_dtype": Limit(
            "it is an argument of TPUDataParallelStrategy itself",
            advice="Use TPUDataParallelStrategy(wire_dtype='bfloat16').",
        ),
        "Communication.compression": _LINKS,
        "Communication.compression_across": _LINKS,
        "Communication.checksum": "the cores share no network that tfdp uses",
        "Communication.repeated_rows": "XLA has no lists with a length that depends on "
        "the step",
        "shard": Limit(
            "stages 2 and 3 give each replica its own gradients and weights, and the "
            "accumulators and layers that read them need a graph for each replica: a "
            "TPU has one for all",
            ("none", "optimizer"),
        ),
        "shard_group": "one process drives all cores",
        "offload": "the cores keep their state",
        "layout": "parts of a weight need a graph for each replica: a TPU has one for "
        "all",
        "devices_per_host": "the number of a TPU's cores is fixed",
    },
    Where("on one host", lambda given: given.hosts == 1): {
        "Communication.engine": _idle(
            "it carries sums between processes, and there is one",
            ("auto", "in_process", "tensorflow"),
        ),
        "Communication.wire_dtype": _idle("gradients are rounded between hosts only"),
        "Communication.min_hosts": _idle("there are no others that could die"),
        "Communication.checksum": _idle("traffic within a host has no checksums"),
        "balance": _idle("there are no other hosts to share a batch with"),
    },
    Where(
        "on one host", lambda given: given.hosts == 1 and not given.compresses_within
    ): {
        "Communication.compression": _idle(
            "gradients are compressed between hosts only, unless "
            "compression_across='replicas'"
        ),
    },
    Where("on one host", lambda given: given.maker in (ONE, AUTO)): {
        "shard_group": _idle(
            "all replicas are on it",
            advice="Leave group out, or use tfdp.MultiHostDataParallelStrategy.",
        ),
        "wire_dtype": "it is the type of gradients between the cores of a TPU; nothing "
        "is rounded within a host",
    },
    Where("in HierarchicalAllReduce", lambda given: given.maker == STOCK): {
        "Communication.compression": Limit(
            "it gets gradients without their variables, so it cannot compress them",
            advice="Use tfdp.DataParallelStrategy(communication=...), or leave "
            "compression out.",
        ),
    },
    Where("on {} hosts", lambda given: given.hosts > 1): {
        "Communication.engine": Limit(
            "it does not cross hosts", ("auto", "sockets", "mpi", "tensorflow")
        ),
        "Communication.hierarchy": "the hosts and their devices are the levels",
        "Communication.compression_across": "within a host sending less gains nothing "
        "and loses much",
        "Communication.min_hosts": Limit(
            "there are never more than that",
            lambda given: (None, *range(1, given.hosts + 1)),
        ),
        "pad_batches": "hosts take short batches unpadded",
        "wire_dtype": "it is the type of gradients between the cores of a TPU; between "
        "hosts it is communication=tfdp.Communication(wire_dtype=...)",
    },
    Where(
        "on {} hosts without error feedback",
        lambda given: given.is_rounded and given["Communication.compression"].selects,
    ): {
        "Communication.compression": Limit(
            "the link rounds every gradient, so min_bytes, exclude and "
            "one_dimensional select none",
            advice="Leave these out, or pass error_feedback=True.",
        ),
    },
    Where("with one replica on each host", lambda given: given.has_idle_shards): {
        "shard_group": Limit(
            "it shards over the replicas of a host, and this host has one",
            advice="Give every process several devices (devices_per_host=4, or tfdp "
            "launch --devices-per-worker 4), or use shard_group='all'.",
        ),
    },
    Where(
        "in a plan of {} hosts", lambda given: given.maker == PLAN and given.hosts > 1
    ): {
        "Communication.engine": Limit(
            "the collectives of 'tensorflow' need connected hosts",
            ("auto", "sockets", "mpi"),
        ),
        "Communication.min_hosts": Limit(
            "such hosts train independently between synchronizations",
            advice="Plan one of them, hosts=1, and add one or two sets of weights, "
            "which sync= keeps.",
        ),
    },
    Where("with shard='none'", lambda given: not given.has("shard")): {
        "offload": Limit(
            "it keeps each replica's shard of the optimizer's state in host memory, "
            "and there are no shards",
            advice="Add shard='optimizer', also on one device; see "
            "docs/sharding.md#offload.",
        ),
    },
    _with("shard", lambda given: given.has_shards_of_all, " over all hosts"): {
        "Communication.engine": Limit(
            "TensorFlow's collectives carry no shards between hosts",
            ("auto", "sockets", "mpi"),
            "Use shard_group='host', which shards within each host, or another engine.",
        ),
    },
    _with("shard", lambda given: not given.is_rounded): {
        "Communication.compression": Limit(
            "it sums whole gradients, and each replica gets a part of the sum only",
            advice="Use shard='none', or wire_dtype='bfloat16', which goes with "
            "shards.",
        ),
    },
    _with("shard"): {
        "balance": "it needs the time that each host computes, and hosts wait for each "
        "other's shards meanwhile",
    },
    Where(
        "without a compression",
        lambda given: not given.has("Communication.compression"),
    ): {
        "Communication.compression_across": Limit(
            "compression=None is none",
            advice="Give a method, such as compression=tfdp.compression.Int8(), or "
            "leave it out.",
        ),
    },
    _with("Communication.compression"): {
        "Communication.wire_dtype": Limit(
            "it is short for compression=tfdp.compression.Cast(...)",
            advice="Leave one of them out.",
        ),
    },
    _with("Communication.checksum", lambda given: given.hosts > 1): {
        "Communication.engine": Limit(
            "only sockets have checksums", ("auto", "sockets")
        ),
    },
    _with("Communication.min_hosts", lambda given: given.hosts > 1): {
        "Communication.engine": Limit(
            "hosts that may die and return use sockets", ("auto", "sockets")
        ),
        "Communication.wire_dtype": _NO_GRADIENTS,
        "Communication.compression": _NO_GRADIENTS,
        "Communication.repeated_rows": _NO_GRADIENTS,
        "shard": "such hosts train locally (sync=), and shards need the replicas of "
        "all hosts",
        "balance": "such hosts train independently, and it splits batches by what all "
        "hosts have measured in the same step",
        "sync.across": "replicas of one host live and die together",
        "sync.start_step": "synchronous updates need all hosts in every step",
        "sync.fragments": "a host comes in when all weights have met",
        "sync.overlap_steps": "what is on its way could be lost with a host",
        "sync.mixing": "a host comes in with the outer weights",
        "sync.compression": "what a method keeps back is owed to the same hosts",
        "sync.quorum": Limit(
            "a quorum is from that to all hosts",
            lambda given: (
                None,
                *range(given["Communication.min_hosts"], given.hosts + 1),
            ),
        ),
        "sync.spare": Limit(
            "so many hosts must be left",
            lambda given: tuple(
                range(given.hosts - given["Communication.min_hosts"] + 1)
            ),
        ),
    },
    Where(
        "without Communication(min_hosts=...)",
        lambda given: not given.has("Communication.min_hosts"),
    ): {
        "sync.quorum": _WITHOUT_LATE_HOSTS,
        "sync.spare": _WITHOUT_LATE_HOSTS,
    },
    _with("layout", lambda given: not given.is_rounded): {
        "Communication.compression": Limit(
            "it sums whole gradients, and of a weight in parts each replica gets its "
            "part of the sum only",
            advice="Leave one of them out, or use wire_dtype='bfloat16'.",
        ),
    },
    _with("layout"): {
        "Communication.min_hosts": "such hosts train locally (sync=), and each host's "
        "parts are sums over all",
        "offload": "it is for flat shards of the optimizer's state",
        "balance": "it needs the time that each host computes, and hosts wait for each "
        "other's parts meanwhile",
        "sync": "each replica would need whole weights of its own",
    },
    _with("sync"): {
        "Communication.repeated_rows": "replicas that train locally take the rows of "
        "an embedding as they come",
        "shard": "it gives each replica its own weights and optimizer state, and "
        "shards spread one copy over replicas, within hosts, too",
        "pad_batches": Limit(
            "padded rows are counted over all replicas", (None, False)
        ),
    },
    _with("sync", lambda given: not given.is_rounded): {
        "Communication.compression": Limit(
            "both determine what hosts send",
            advice="Leave out one of them; tfdp.sync.DiLoCo(compression=...) "
            "compresses what a synchronization sends.",
        ),
    },
    _with("sync", lambda given: given["sync"].has_own_pace): {
        "Communication.wire_dtype": _OWN_TYPE,
        "Communication.compression": _OWN_TYPE,
    },
    _with("sync", lambda given: given["sync"].needs_all_hosts): {
        "Communication.min_hosts": Limit(
            "it needs all hosts, and with min_hosts they may die and come back",
            advice="Use tfdp.sync.DiLoCo, or leave min_hosts out.",
        ),
    },
}


def _conflicts(
    given: Given,
) -> Iterator[tuple[str, Where, Limit, tuple[Any, ...]]]:
    """The options that cannot act: name, where not, why, and allowed values."""
    for where, limits in LIMITS.items():
        if not where.holds(given):
            continue
        for name, text in limits.items():
            limit = Limit(text) if isinstance(text, str) else text
            allowed = limit.values or (OPTIONS[name].default,)
            values = allowed(given) if callable(allowed) else allowed
            if given[name] not in values:
                yield name, where, limit, values


def why_not(given: Given) -> str:
    """Why an option cannot act where it is given, or with the others; "": all can."""
    return next((limit.why for _, _, limit, _ in _conflicts(given)), "")


def refuse_options(given: Given) -> None:
    """Raises ConfigurationError for the first option with a wrong value, or one that
    cannot act where it is given, or with the others."""
    for name, value in given.values.items():
        OPTIONS[name].check(value)
    for name, where, limit, allowed in _conflicts(given):
        advice = limit.advice or f"Allowed here: {', '.join(map(repr, allowed))}."
        if not limit.advice and allowed == (OPTIONS[name].default,):
            advice = "Leave out one of the two." if where.option else "Leave it out."
        raise ConfigurationError(
            f"{_shown(name, given)} cannot act {where.describe(given)}: "
            f"{limit.why}. {advice}"
        )


def _shown(name: str, given: Given) -> str:
    """The option as a program gives it, without the arguments of a large value."""
    owner, _, field = name.rpartition(".")
    if owner == "sync":
        owner = type(given["sync"]).__name__
    value = given[name]
    text = repr(value) if len(repr(value)) <= 40 else f"{type(value).__name__}(...)"
    return f"{owner}({field}={text})" if owner else f"{field}={text}"


def without_idle_options(given: Given) -> tuple[Given, dict[str, str]]:
    """`given` without options that act elsewhere only, and these with the reasons.

    Bounds that nothing reaches have no reason.

    >>> rest, idle = without_idle_options(Given(AUTO, 1, {"balance": "speed"}))
    >>> rest["balance"], idle
    (None, {'balance': 'there are no other hosts to share a batch with'})
    """
    rest, idle = dict(given.values), {}
    for name, _, limit, _ in _conflicts(given):
        if limit.is_left_out:
            OPTIONS[name].check(rest[name])
            rest[name] = OPTIONS[name].default
            if not OPTIONS[name].is_bound:
                idle[name.rpartition(".")[2]] = limit.why
    return dataclasses.replace(given, values=rest), idle


def options_of(communication: Any, sharding: Any, **others: Any) -> dict[str, Any]:
    """The values of all options by name, for `Given`."""
    return {
        "shard": sharding.what,
        "shard_group": sharding.group,
        "shard_min_bytes": sharding.min_bytes,
        "offload": sharding.offload,
        **others,
        **fields_of(communication),
    }


def fields_of(communication: Any) -> dict[str, Any]:
    """The values of a `Communication` by the names of its options."""
    return {
        f"Communication.{field.name}": getattr(communication, field.name)
        for field in dataclasses.fields(communication)
    }
