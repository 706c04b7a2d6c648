"""Variables of which each replica holds, or updates, a part (`shard=`).

variables      sharded variables: what a read and an assignment do
updates        creates sharded variables; reads and updates them in a replica
optimizers     what Keras optimizers need besides their elementwise arithmetic
tpu_variables  the same on a TPU
"""
