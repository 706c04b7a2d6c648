"""Input for data-parallel training: sharded TFRecords and TensorFlow Datasets.

Every reader yields global batches, which a strategy splits over its replicas. Names
resolve on first use, so an index can be read without TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.data.features import FeatureSpec
    from tfdp.data.index import RecordFile, RecordIndex
    from tfdp.data.read import read_tfrecords
    from tfdp.data.tfds import from_tfds
    from tfdp.data.verify import index_tfrecords, verify_tfrecords
    from tfdp.data.webdataset import index_webdataset, read_webdataset
    from tfdp.data.write import write_tfrecords

# Public name -> module that defines it.
_PUBLIC = {
    "FeatureSpec": "tfdp.data.features",
    "RecordFile": "tfdp.data.index",
    "RecordIndex": "tfdp.data.index",
    "from_tfds": "tfdp.data.tfds",
    "index_tfrecords": "tfdp.data.verify",
    "index_webdataset": "tfdp.data.webdataset",
    "read_tfrecords": "tfdp.data.read",
    "read_webdataset": "tfdp.data.webdataset",
    "verify_tfrecords": "tfdp.data.verify",
    "write_tfrecords": "tfdp.data.write",
}

__all__ = [
    "FeatureSpec",
    "RecordFile",
    "RecordIndex",
    "from_tfds",
    "index_tfrecords",
    "index_webdataset",
    "read_tfrecords",
    "read_webdataset",
    "verify_tfrecords",
    "write_tfrecords",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdp.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
