"""Files that an option asks for: what is wrong with their place is said in one line."""

import errno
import json
import os

import pytest

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import (
    refuse_bad_place,
    refuse_bad_places,
    write_json_for,
    write_text_for,
)


def test_a_file_does_not_take_the_place_of_a_folder_or_a_device(tmp_path):
    for path, words in (
        (tmp_path, "that is a folder"),
        (os.devnull, "a device or a pipe"),
        (tmp_path / "missing" / "file", "no such folder"),
    ):
        with pytest.raises(ConfigurationError, match=f"--json .*{words}"):
            refuse_bad_place("--json", str(path))
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "new", tmp_path / ("n" * 300)):
        refuse_bad_place("--json", str(path))
    refuse_bad_place("--json", None)


def test_two_options_do_not_write_to_one_file(tmp_path):
    page, link = tmp_path / "page", tmp_path / "link"
    link.symlink_to(page)
    refuse_bad_places({"--json": str(page), "--page": str(tmp_path / "other")})
    refuse_bad_places({"--json": None, "--page": None})
    for other in (page, link, tmp_path / "." / "page"):
        with pytest.raises(ConfigurationError, match="--page .*: --json writes to"):
            refuse_bad_places({"--json": str(page), "--page": str(other)})
    with pytest.raises(ConfigurationError, match="that is a folder"):
        refuse_bad_places({"--json": str(tmp_path), "--page": None})


def test_what_was_asked_for_is_written_and_replaced(tmp_path):
    path = tmp_path / "page.html"
    for text in ("one", "half a character: \ud800"):
        write_text_for("--page", path, text)
    assert path.read_text("utf-8") == "half a character: ?"
    write_json_for("--json", path, {"a": 1})
    assert json.loads(path.read_text("utf-8")) == {"a": 1}
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_disk_that_is_full_is_said_with_what_to_do(tmp_path, monkeypatch):
    def full(*names):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    for write, value in ((write_text_for, "text"), (write_json_for, {"a": 1})):
        with pytest.raises(ConfigurationError, match=r"--out .* \(No space left.*PATH"):
            write("--out", tmp_path / "file", value)
    assert os.listdir(tmp_path) == []
