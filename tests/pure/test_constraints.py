"""The pins can be installed on every Python that setup.cfg allows."""

import configparser
import importlib.metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.package_source import REPOSITORY

PINS = [
    Requirement(line)
    for line in REPOSITORY.joinpath("constraints.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


def allowed_pythons():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg", "utf-8")
    allowed = SpecifierSet(setup["options"]["python_requires"])
    found = [f"3.{minor}" for minor in range(30) if f"3.{minor}.9" in allowed]
    assert len(found) >= 4
    return found


def applies(pin, python):
    environment = {"python_version": python, "python_full_version": f"{python}.9"}
    return pin.marker is None or pin.marker.evaluate(environment)


def test_a_pin_without_a_release_for_a_python_leaves_it_out():
    wrong = []
    for pin in PINS:
        try:
            installed = importlib.metadata.metadata(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed["Version"] not in pin.specifier:
            continue  # the pin of another Python
        needed = installed["Requires-Python"]
        wrong += [
            f"{pin} on {python}"
            for python in allowed_pythons()
            if applies(pin, python) and f"{python}.9" not in SpecifierSet(needed or "")
        ]
    assert wrong == []


def test_pins_are_in_order_and_one_applies():
    names = [pin.name.lower() for pin in PINS]
    assert names == sorted(names)
    for python in allowed_pythons():
        applied = [pin.name.lower() for pin in PINS if applies(pin, python)]
        assert applied == sorted(set(applied)), python
