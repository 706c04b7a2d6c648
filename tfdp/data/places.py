"""File locations: local paths, and URLs that TensorFlow can open.

`RemotePath` has the few methods of `pathlib.Path` that sets of files need, on
`tf.io.gfile`. Local paths stay `pathlib.Path` and need no TensorFlow.
"""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def _translated_errors(place: RemotePath) -> Iterator[None]:
    """Turns TensorFlow's errors into those of a local path, or a `DataError`."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(f"there is no {place}") from error
    except tf.errors.OpError as error:
        raise DataError(
            f"{place} cannot be used ({type(error).__name__}: {error.message}); "
            "check that the bucket exists and that this machine may use it"
        ) from error


def _translates_errors(method: Method) -> Method:
    @functools.wraps(method)
    def checked(self: RemotePath, *args: Any, **kwargs: Any) -> Any:
        with _translated_errors(self):
            return method(self, *args, **kwargs)

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

    @contextlib.contextmanager
    def open(self, mode: str) -> Iterator[Any]:
        """Opens the file; an object of a store appears when it is complete."""
        with _translated_errors(self), _gfile().GFile(self._url, mode) as file:
            yield file

    def read_text(self) -> str:
        with self.open("r") as file:
            return file.read()

    def write_text(self, text: str) -> int:
        with self.open("w") as file:
            file.write(text)
        return len(text)

    @_translates_errors
    def stat(self) -> Size:
        found = _gfile().stat(self._url)
        return Size(found.length, found.mtime_nsec / 1e9)

    @_translates_errors
    def replace(self, target: str | os.PathLike[str]) -> None:
        _gfile().rename(self._url, os.fspath(target), overwrite=True)

    @_translates_errors
    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        _gfile().makedirs(self._url)

    def unlink(self, missing_ok: bool = False) -> None:
        ignored = (FileNotFoundError,) if missing_ok else ()
        with contextlib.suppress(*ignored), _translated_errors(self):
            _gfile().remove(self._url)

    @_translates_errors
    def remove_all(self) -> None:
        _gfile().rmtree(self._url)


Place = Path | RemotePath


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
    found: list[Any] = []
    if isinstance(place, Path):
        found = [Path(path) for path in glob.glob(os.fspath(pattern))]
    else:
        with contextlib.suppress(FileNotFoundError), _translated_errors(place):
            found = [RemotePath(url) for url in _gfile().glob(os.fspath(place))]
    return sorted(path for path in found if path.is_file())
