"""Variables of which each replica holds, or updates, a part (`shard=`).

variables      what a read and an assignment of a sharded variable are
views          a shard of a mirrored weight, while it is updated
updates        where sharded variables come from; reads and updates by a replica
optimizers     what Keras' optimizers need besides their own arithmetic
saved_model    a whole variable in the place of shards, for files
tpu_variables  the same on a TPU
"""
