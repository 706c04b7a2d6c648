"""`tfdp info`: versions, devices, and the settings that tfdp would choose here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import Any

import tfdp
from tfdp.cluster.machine import describe_machine, installed_versions
from tfdp.errors import ClusterError, ConfigurationError, DeviceWarning
from tfdp.strategies.quiet import import_tensorflow_quietly

# As in `setup.cfg`.
MINIMUM_VERSIONS = {"tensorflow": (2, 20), "keras": (3, 12)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `tfdp info`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--virtual-devices",
        type=int,
        metavar="N",
        help="show what would be chosen after tfdp.use_virtual_devices(N)",
    )
    parser.add_argument(
        "--step",
        metavar="SCRIPT",
        help="run SCRIPT until its first training step is traced, and show what each "
        "feature of tfdp does in it; the script's own arguments follow after --",
    )


def run(options: argparse.Namespace) -> int:
    """Runs `tfdp info`; returns the exit code, 1 when training is impossible here."""
    if options.step is None and options.arguments:
        raise ConfigurationError("Only --step SCRIPT takes words after --.")
    if options.step is not None:
        import_tensorflow_quietly()
        if options.virtual_devices is not None:
            tfdp.use_virtual_devices(options.virtual_devices)
        from tfdp.tools.commands.step_features import print_features

        print_features(options.step, options.arguments, as_json=options.json)
    facts = gather_facts(options.virtual_devices)
    print(json.dumps(facts, indent=1) if options.json else format_facts(facts))
    return 0 if facts["strategy"] else 1


def gather_facts(virtual_devices: int | None = None) -> dict[str, Any]:
    """The facts that `tfdp info` prints, as plain data.

    Without TensorFlow, `devices` and `strategy` are None and a warning says why.

    Args:
      virtual_devices: see `tfdp.use_virtual_devices`; None: leave the devices.
    """
    facts: dict[str, Any] = {
        "versions": installed_versions(),
        "checked_versions": None,
        "machine": describe_machine(),
        "devices": None,
        "strategy": None,
        "cluster": _cluster(),
        "warnings": [],
    }
    if facts["versions"]["tensorflow"] is None:
        facts["warnings"].append(tfdp.MISSING_TENSORFLOW)
        return facts

    import_tensorflow_quietly()
    from tfdp.seams.table import CHECKED_VERSIONS

    if virtual_devices is not None:
        tfdp.use_virtual_devices(virtual_devices)
    facts["checked_versions"] = dict(CHECKED_VERSIONS)
    facts["devices"] = _devices()
    facts["strategy"] = _strategy()
    facts["warnings"] = [
        *_version_warnings(facts["versions"], CHECKED_VERSIONS),
        *_setting_warnings(facts["strategy"]["devices"]),
    ]
    return facts


def _cluster() -> dict[str, Any] | None:
    try:
        cluster = tfdp.find_cluster()
    except ClusterError as error:
        return {"error": str(error)}
    if cluster is None or cluster.workers == 1:
        return None
    from tfdp.hosts.choose_link import link_name

    engine, reason = link_name(tfdp.Communication())
    return {**dataclasses.asdict(cluster), "engine": engine, "engine_reason": reason}


def _devices() -> dict[str, list[dict[str, str]]]:
    import tensorflow as tf

    def facts(device: Any) -> dict[str, str]:
        return {"name": device.name, "type": device.device_type}

    physical = []
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device)
        physical.append({**facts(device), "model": details.get("device_name", "")})
    logical = [facts(device) for device in tf.config.list_logical_devices()]
    return {"physical": physical, "logical": logical}


def _strategy() -> dict[str, Any]:
    from tfdp.exchange.choose_engine import choose_engine

    # Not auto_strategy, which waits for the other workers of a cluster.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeviceWarning)  # listed among the facts
        strategy = tfdp.DataParallelStrategy(alone=True)
    devices = list(strategy.extended.worker_devices)
    engine = choose_engine(devices, strategy.communication)
    topology = strategy.topology
    return {
        "class": type(strategy).__name__,
        "devices": devices,
        "topology": {
            "hosts": topology.hosts,
            "devices_per_host": topology.devices_per_host,
        },
        "engine": engine.name,
        "engine_reason": engine.reason,
    }


def _version_warnings(
    versions: Mapping[str, str | None], checked: Mapping[str, str]
) -> list[str]:
    found = []
    for package, minimum in MINIMUM_VERSIONS.items():
        version = versions[package]
        if version is None:
            found.append(f"{package} is not installed: pip install {package}")
        elif tuple(int(part) for part in version.split(".")[:2]) < minimum:
            least = ".".join(map(str, minimum))
            found.append(f"{package} {version} is too old: tfdp needs {least}")
        elif version != checked[package]:
            found.append(
                f"{package} {version} is not the version that tfdp was checked with, "
                f"{checked[package]}; run tfdp's own tests: make test"
            )
    return found


def _setting_warnings(devices: list[str]) -> list[str]:
    import keras

    from tfdp.strategies.devices import unseen_gpus

    unseen, backend = unseen_gpus(), keras.config.backend()
    found = [] if unseen is None else [unseen]
    if backend != "tensorflow":
        found.append(f"Keras runs on {backend}: set KERAS_BACKEND=tensorflow")
    if len(devices) == 1:
        found.append(
            "one device, so one replica: nothing to distribute. "
            "tfdp.use_virtual_devices(n) makes n logical CPUs to try things out"
        )
    if sum("GPU" in device for device in devices) > 1:
        found.append(
            "sums over NCCL were tested with one GPU only: run `tfdp selftest` on this "
            "machine"
        )
    return found


def format_facts(facts: Mapping[str, Any]) -> str:
    """The facts as lines for the terminal."""
    lines = []
    checked = facts["checked_versions"] or {}
    for package, version in facts["versions"].items():
        note = f"(checked with {checked[package]})" if package in checked else ""
        lines.append(_line(package, version or "not installed", note))
    machine = facts["machine"]
    memory = machine["memory_bytes"]
    lines += [
        _line("system", machine["system"]),
        _line("processor", machine["processor"]),
        _line("usable cores", str(machine["usable_cores"])),
        _line("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown"),
    ]
    if facts["devices"]:
        physical = facts["devices"]["physical"]
        names = [f"{d['name'].rsplit('device:')[-1]} {d['model']}" for d in physical]
        lines.append(_line("physical devices", ", ".join(map(str.strip, names))))
        logical = [device["name"] for device in facts["devices"]["logical"]]
        lines.append(_line("logical devices", ", ".join(map(_short, logical))))
    cluster = facts["cluster"]
    if cluster and "error" in cluster:
        lines.append(_line("cluster", cluster["error"]))
    elif cluster:
        where = f"worker {cluster['rank']} of {cluster['workers']}"
        lines.append(_line("cluster", where, f"(from {cluster['source']})"))
        engine = f"({cluster['engine_reason']})"
        lines.append(_line("between hosts", cluster["engine"], engine))
    if facts["strategy"]:
        lines += _strategy_lines(facts["strategy"])
    lines += [_line("warning", warning) for warning in facts["warnings"]]
    return "\n".join(lines)


def _strategy_lines(strategy: Mapping[str, Any]) -> list[str]:
    topology = strategy["topology"]
    replicas = len(strategy["devices"])
    kinds = {_short(device).split(":")[0] for device in strategy["devices"]}
    return [
        _line(
            "strategy",
            f"{strategy['class']}, {replicas} replica(s)",
            f"(one host; all its {' and '.join(sorted(kinds))} devices)",
        ),
        _line(
            "topology",
            f"{topology['hosts']} host(s) x {topology['devices_per_host']} device(s)",
        ),
        _line("engine", strategy["engine"], f"({strategy['engine_reason']})"),
    ]


def _short(device: str) -> str:
    return device.rsplit("device:")[-1]


def _line(label: str, text: str, note: str = "") -> str:
    return f"{label:<17} {text} {note}".rstrip()
