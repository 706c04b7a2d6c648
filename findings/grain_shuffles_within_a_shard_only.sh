#!/usr/bin/env bash
# grain 0.2.18: IndexSampler(shuffle=True) gives a worker the same records in every epoch.
#
# It divides the records in order first, as many neighbours for each worker, and then shuffles
# within each part. If the files lie by class or by day, each worker sees its classes or days for
# ever, and a global batch is never drawn from all. A good guess would be one shuffle of all records
# that is dealt out anew each epoch, as torch's DistributedSampler does.
# MapDataset.source(...).shuffle(seed) and then [worker::workers] is that.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "grain==0.2.18"
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import grain

RECORDS, WORKERS, EPOCHS = 8, 2, 20


def records_of(worker):
    sampler = grain.samplers.IndexSampler(
        num_records=RECORDS,
        shard_options=grain.sharding.ShardOptions(shard_index=worker, shard_count=WORKERS),
        shuffle=True,
        num_epochs=EPOCHS,
        seed=1,
    )
    each = RECORDS // WORKERS
    keys = [sampler[worker + place * WORKERS].record_key for place in range(EPOCHS * each)]
    return [keys[start : start + each] for start in range(0, len(keys), each)]


print("grain", version("grain"))
for worker in range(WORKERS):
    epochs = records_of(worker)
    seen = sorted({record for epoch in epochs for record in epoch})
    print(f"worker {worker}: epochs {epochs[0]} {epochs[1]} ..., all of {EPOCHS} epochs:", seen)
    if len(seen) != RECORDS // WORKERS or epochs[0] == epochs[1]:
        raise SystemExit("changed")
data = grain.MapDataset.range(RECORDS).seed(1).shuffle().repeat(EPOCHS)[0::WORKERS]
seen = sorted({data[place] for place in range(len(data))})
print("worker 0 of MapDataset.shuffle().repeat()[0::2], all records:", seen)
if len(seen) != RECORDS:
    raise SystemExit("changed")
PYTHON
