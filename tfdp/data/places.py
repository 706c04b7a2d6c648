"""File locations: local paths, and URLs that TensorFlow can open.

`RemotePath` has the few methods of `pathlib.Path` that sets of files need, on
`tf.io.gfile`. Local paths stay `pathlib.Path` and need no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

from tfdp.errors import ConfigurationError, DataError

Method = TypeVar("Method", bound=Callable[..., Any])


class Size(NamedTuple):
    """The result of `RemotePath.stat`: bytes, and seconds (0 if unknown)."""

    st_size: int
    st_mtime: float


def _translates_errors(method: Method) -> Method:
    """Turns TensorFlow's errors into those of a local path, or a `DataError`."""

    @functools.wraps(method)
    def checked(self: RemotePath | RemoteFile, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        try:
            return method(self, *args, **kwargs)
        except tf.errors.NotFoundError as error:
            raise FileNotFoundError(f"there is no {self}") from error
        except tf.errors.OpError as error:
            raise DataError(
                f"{self} cannot be used ({type(error).__name__}: {error.message}); "
                "check that the bucket exists and that this machine may use it"
            ) from error

    return checked  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, order=True)
class RemotePath:
    """A URL such as `gs://bucket/folder/file`, with the methods of `pathlib.Path`."""

    _url: str

    def __post_init__(self) -> None:
        scheme, _, path = self._url.partition("://")
        object.__setattr__(self, "_url", f"{scheme}://{path.rstrip('/')}")

    def __fspath__(self) -> str:
        return self._url

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.partition("://")[2].rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        scheme, _, path = self._url.partition("://")
        return RemotePath(f"{scheme}://{path.rpartition('/')[0]}")

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    @_translates_errors
    def is_dir(self) -> bool:
        """Whether it is a folder; some stores say so for the prefix of any name."""
        return _gfile().isdir(self._url)

    @_translates_errors
    def is_file(self) -> bool:
        return _gfile().exists(self._url) and not self.is_dir()

    @_translates_errors
    def glob(self, pattern: str) -> Iterator[RemotePath]:
        if not self.is_dir():
            return iter(())
        # Object stores name folders with a slash at the end.
        names = [name.rstrip("/") for name in _gfile().listdir(self._url)]
        return (self / name for name in fnmatch.filter(names, pattern))

    @_translates_errors
    def read_text(self) -> str:
        with _gfile().GFile(self._url, "r") as file:
            return file.read()

    @_translates_errors
    def write_text(self, text: str) -> int:
        """Writes the file; on object stores it appears when it is complete."""
        with _gfile().GFile(self._url, "w") as file:
            file.write(text)
        return len(text)

    @_translates_errors
    def stat(self) -> Size:
        found = _gfile().stat(self._url)
        return Size(found.length, found.mtime_nsec / 1e9)

    def open(self) -> RemoteFile:
        return RemoteFile(self._url)

    @_translates_errors
    def replace(self, target: str | os.PathLike[str]) -> None:
        _gfile().rename(self._url, os.fspath(target), overwrite=True)

    @_translates_errors
    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        _gfile().makedirs(self._url)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._remove()
        except FileNotFoundError:
            if not missing_ok:
                raise

    @_translates_errors
    def _remove(self) -> None:
        _gfile().remove(self._url)

    @_translates_errors
    def remove_all(self) -> None:
        _gfile().rmtree(self._url)


class RemoteFile:
    """A file behind a URL, opened to read bytes."""

    def __init__(self, url: str):
        self._url, self._file = url, _gfile().GFile(url, "rb")

    def __str__(self) -> str:
        return self._url

    @_translates_errors
    def read(self, count: int) -> bytes:
        return self._file.read(count)

    @_translates_errors
    def seek(self, position: int) -> None:
        self._file.seek(position)

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


Place = Path | RemotePath


def open_binary(place: Place) -> Any:
    """Opens a file to read bytes, with `read` and `seek`."""
    return place.open() if isinstance(place, RemotePath) else place.open("rb")


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


def place_of(path: str | os.PathLike[str]) -> Place:
    """A local path, or a URL that TensorFlow can open, else a `ConfigurationError`."""
    text = os.fspath(path)
    if "\0" in text:
        raise ConfigurationError(
            f"A path cannot hold the character NUL. Received: {text!r}."
        )
    # A single letter is a Windows drive; a folder may end in a colon, but hardly "gs:".
    parts = path.parts if isinstance(path, PurePath) else ()
    if parts and parts[0] in ("gs:", "s3:", "hdfs:", "ram:", "file:"):
        raise ConfigurationError(
            f"{text} was a URL before pathlib took one of its slashes; give it as text"
        )
    if isinstance(path, Path | RemotePath):
        return path
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(text)
    allowed = sorted(name for name in _gfile().get_registered_schemes() if name)
    if scheme not in allowed:
        raise ConfigurationError(
            f"{text} is a URL of a kind that TensorFlow cannot open; allowed are "
            f"{', '.join(f'{name}://' for name in allowed)}, and local paths. Others, "
            "as s3://, come with tensorflow-io. Or mount the bucket, or copy the files"
        )
    return Path(rest) if scheme == "file" else RemotePath(text)


def matching_files(pattern: str | os.PathLike[str]) -> list[Place]:
    """The files whose whole path matches, sorted by name."""
    place = place_of(pattern)
    if isinstance(place, RemotePath):
        find = _translates_errors(lambda place: _gfile().glob(os.fspath(place)))
        try:
            found: list[Any] = [RemotePath(url) for url in find(place)]
        except FileNotFoundError:
            return []
    else:
        found = [Path(path) for path in glob.glob(os.fspath(pattern))]
    return sorted(path for path in found if path.is_file())
