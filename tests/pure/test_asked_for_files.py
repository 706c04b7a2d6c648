"""Files that an option asks for: what is wrong with their place is said in one line."""

import errno
import json
import os

import pytest

from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import (
    check_output_path,
    check_output_paths,
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
            check_output_path("--json", str(path))
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "new", tmp_path / ("n" * 300)):
        check_output_path("--json", str(path))
    check_output_path("--json", None)


def test_a_link_leads_to_the_file_that_is_written(tmp_path):
    page, link, loop = (tmp_path / name for name in ("page", "link", "loop"))
    link.symlink_to("page")
    loop.symlink_to("loop")
    for text in ("one", "two"):  # made, and replaced
        check_output_path("--page", str(link))
        write_text_for("--page", link, text)
        assert link.is_symlink() and page.read_text("utf-8") == text
    with pytest.raises(ConfigurationError, match="a link to itself"):
        check_output_path("--page", str(loop))
    with pytest.raises(ConfigurationError, match="cannot be written .it is no file"):
        write_text_for("--page", loop, "three")
    assert loop.is_symlink()


def test_what_a_process_has_open_is_no_place_for_a_file(tmp_path, monkeypatch):
    """Whatever stands there: `tfdp ... --page /dev/stdout > page`, as root."""
    stream = tmp_path / "stream"
    with (tmp_path / "page").open("w") as file:
        stream.symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(ConfigurationError, match="a device or a pipe"):
            check_output_path("--page", str(stream))
    device = tmp_path / "device"
    device.symlink_to(os.devnull)
    with pytest.raises(ConfigurationError, match="cannot be written .it is no file"):
        write_text_for("--page", device, "text")
    assert not os.path.isfile(os.devnull)


def test_two_options_do_not_write_to_one_file(tmp_path):
    page, link = tmp_path / "page", tmp_path / "link"
    link.symlink_to(page)
    check_output_paths({"--json": str(page), "--page": str(tmp_path / "other")})
    check_output_paths({"--json": None, "--page": None})
    for other in (page, link, tmp_path / "." / "page"):
        with pytest.raises(ConfigurationError, match="--page .*: --json writes to"):
            check_output_paths({"--json": str(page), "--page": str(other)})
    with pytest.raises(ConfigurationError, match="that is a folder"):
        check_output_paths({"--json": str(tmp_path), "--page": None})


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
