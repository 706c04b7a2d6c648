"""Input for data-parallel training: sharded TFRecords and TensorFlow Datasets.

Every reader yields global batches, which a strategy splits over its replicas. Names
resolve on first use, so an index can be read without TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdp._private.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
