#!/usr/bin/env bash
# etils 1.15.0, epath: a path in an object store is not the string it was made from.
#
# In an object store "a//c", "a/./c" and "a/c" are the names of three objects, and "a/" is another
# one than "a". epath.Path, with which TensorFlow Datasets and Orbax take paths, makes them one, so
# that open(), exists() and glob() ask for another object than the one that was given. A good guess
# would be that what follows the scheme and the bucket stays as it is, since ".." does stay.
# A scheme that TensorFlow opens and epath does not know, such as hdfs://, is a bare KeyError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "etils[epath]==1.15.0"
"$folder/venv/bin/python" - <<'PYTHON'
from etils import epath

GIVEN = {
    "gs://bucket/a//c": "gs://bucket/a/c",
    "s3://bucket/a//c": "s3://bucket/a/c",
    "gs://bucket/a/./c": "gs://bucket/a/c",
    "gs://bucket/a/": "gs://bucket/a",
    "gs://bucket/a/../c": "gs://bucket/a/../c",
}
for given, seen in GIVEN.items():
    print(f"{given:20} -> {epath.Path(given)}")
    if str(epath.Path(given)) != seen:
        raise SystemExit(f"changed: {given} was {seen}")
try:
    epath.Path("hdfs://host/a")
except KeyError as error:
    print(f"hdfs://host/a        -> KeyError: {error}")
else:
    raise SystemExit("changed: hdfs:// is known")
PYTHON
