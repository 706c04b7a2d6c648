"""Where files lie: paths of this machine, and URLs that TensorFlow can open.

A `RemotePath` has the few methods of `pathlib.Path` that sets of files need, by
`tf.io.gfile`. Local paths stay `pathlib.Path` and need no TensorFlow.
"""

from __future__ import annotations

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
    """What `stat` tells of a file."""

    st_size: int
    st_mtime: float


def _in_plain_words(method: Method) -> Method:
    """TensorFlow's errors as those that a local path would raise, or a `DataError`."""

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
                "look whether the bucket exists and this machine may use it"
            ) from error

    return checked  # type: ignore[return-value]


class RemotePath:
    """A URL such as `gs://bucket/folder/file`, with the methods of `pathlib.Path`.

    Args:
      url: scheme, `://`, and a path.

    >>> place = RemotePath("gs://bucket/train/") / "a.tfrecord"
    >>> str(place), place.name, str(place.parent)
    ('gs://bucket/train/a.tfrecord', 'a.tfrecord', 'gs://bucket/train')
    """

    def __init__(self, url: str):
        scheme, _, path = url.partition("://")
        self._url = f"{scheme}://{path.rstrip('/')}"

    def __fspath__(self) -> str:
        return self._url

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == str(other)

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < str(other)

    @property
    def name(self) -> str:
        """What stands after the last slash."""
        return self._url.partition("://")[2].rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in."""
        scheme, _, path = self._url.partition("://")
        return RemotePath(f"{scheme}://{path.rpartition('/')[0]}")

    def with_name(self, name: str) -> RemotePath:
        """Another file of the same folder."""
        return self.parent / name

    @_in_plain_words
    def is_dir(self) -> bool:
        """Whether it is a folder; some stores say so of the start of any name."""
        return _gfile().isdir(self._url)

    @_in_plain_words
    def is_file(self) -> bool:
        """Whether it is a file."""
        return _gfile().exists(self._url) and not self.is_dir()

    @_in_plain_words
    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """The files of this folder whose names match."""
        if not self.is_dir():
            return iter(())
        # Object stores name folders with a slash at the end.
        names = [name.rstrip("/") for name in _gfile().listdir(self._url)]
        return (self / name for name in fnmatch.filter(names, pattern))

    @_in_plain_words
    def read_text(self) -> str:
        """The whole file."""
        with _gfile().GFile(self._url, "r") as file:
            return file.read()

    @_in_plain_words
    def write_text(self, text: str) -> int:
        """Writes the whole file; on object stores it appears when it is complete."""
        with _gfile().GFile(self._url, "w") as file:
            file.write(text)
        return len(text)

    @_in_plain_words
    def stat(self) -> Size:
        """Its size in bytes, as `st_size`, and when it was written, as `st_mtime`.

        The time is in seconds; 0 where the store does not know.
        """
        found = _gfile().stat(self._url)
        return Size(found.length, found.mtime_nsec / 1e9)

    def open(self) -> RemoteFile:
        """The file, to read bytes of."""
        return RemoteFile(self._url)

    @_in_plain_words
    def replace(self, target: str | os.PathLike[str]) -> None:
        """Gives it another name, in the place of what has that name."""
        _gfile().rename(self._url, os.fspath(target), overwrite=True)

    @_in_plain_words
    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Makes the folder, where the store has such a thing."""
        _gfile().makedirs(self._url)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file."""
        try:
            self._remove()
        except FileNotFoundError:
            if not missing_ok:
                raise

    @_in_plain_words
    def _remove(self) -> None:
        _gfile().remove(self._url)

    @_in_plain_words
    def remove_all(self) -> None:
        """Removes the folder, and all that lies in it."""
        _gfile().rmtree(self._url)


class RemoteFile:
    """A file behind a URL, to read bytes of; a store answers when it is asked."""

    def __init__(self, url: str):
        self._url, self._file = url, _gfile().GFile(url, "rb")

    def __str__(self) -> str:
        return self._url

    @_in_plain_words
    def read(self, count: int) -> bytes:
        """The next bytes; fewer at the end."""
        return self._file.read(count)

    @_in_plain_words
    def seek(self, position: int) -> None:
        """Goes to a byte."""
        self._file.seek(position)

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


Place = Path | RemotePath


def open_binary(place: Place) -> Any:
    """A file to read bytes of, with `read` and `seek`; close it."""
    return place.open() if isinstance(place, RemotePath) else place.open("rb")


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


def place_of(path: str | os.PathLike[str]) -> Place:
    """A path of this machine, or a URL that TensorFlow can open.

    Raises:
      ConfigurationError: TensorFlow knows no such URLs, or `pathlib` has spoilt one.
    """
    if isinstance(path, Path | RemotePath) and not _is_spoilt_url(path):
        return path
    text = os.fspath(path)
    if _is_spoilt_url(path):
        raise ConfigurationError(
            f"{text} was a URL before pathlib took one of its slashes; give it as text"
        )
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(text)
    known = sorted(name for name in _gfile().get_registered_schemes() if name)
    if scheme not in known:
        raise ConfigurationError(
            f"{text} is a URL of a kind that TensorFlow cannot open; allowed are "
            f"{', '.join(f'{name}://' for name in known)}, and local paths. Others, "
            "such as s3://, come with the package tensorflow-io. Or mount the "
            "bucket, or copy the files"
        )
    if scheme == "file":
        return Path(rest)
    return RemotePath(text)


def _is_spoilt_url(path: object) -> bool:
    parts = path.parts if isinstance(path, PurePath) else ()
    # One letter is a Windows drive; a folder may end with a colon, but hardly "gs:".
    return bool(parts) and parts[0] in ("gs:", "s3:", "hdfs:", "ram:", "file:")


def matching_files(pattern: str | os.PathLike[str]) -> list[Place]:
    """The files whose whole path matches, in the order of their names.

    Raises:
      ConfigurationError: as `place_of`.
      DataError: the store cannot be reached.
    """
    place = place_of(pattern)
    if isinstance(place, RemotePath):
        return sorted(p for p in _remote_matches(place) if p.is_file())
    found = sorted(Path(path) for path in glob.glob(os.fspath(pattern)))
    return [path for path in found if path.is_file()]


def _remote_matches(pattern: RemotePath) -> list[RemotePath]:
    find = _in_plain_words(lambda place: _gfile().glob(os.fspath(place)))
    try:
        return [RemotePath(url) for url in find(pattern)]
    except FileNotFoundError:
        return []
