"""What a strategy does after `close()`, and one whose constructor raised.

python -m tests.support.closed_strategy ENGINE

Prints a line for each thing that was tried, with the error, and the threads that are
left.
"""

import sys
import threading
import time

import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model
from tfdp.cluster import find_cluster
from tfdp.exchange import over_collectives

# Only there to end a hang.
HANG_SECONDS = 60


def tell(what, function):
    """Prints the error of `function`; TensorFlow puts its own around some."""
    try:
        function()
    except Exception as error:
        words = str(error).replace("\n", " ")
        print(f"{what}: {type(error).__name__}: {words}", flush=True)
    else:
        print(f"{what}: no error", flush=True)


def tell_threads(when):
    """The threads of tfdp that do not end."""
    deadline = time.monotonic() + HANG_SECONDS
    names = ["?"]
    while names and time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate() if t.name.startswith("tfdp")]
        time.sleep(0.05)
    print(f"threads after {when}: {names}", flush=True)


def fail_to_construct():
    """The workers differ, which they find out when they are connected."""
    size = 2**20 * (1 + find_cluster().rank)
    tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(bucket_bytes=size, first_bucket_bytes=2**20)
    )


def main(engine):
    over_collectives.SMALLEST_BYTES = 0
    if engine != "tensorflow":  # which starts once in a process
        tell("construct", fail_to_construct)
        tell_threads("construct")
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(engine=engine)
    )
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = classification_data(48)
    model.fit(x, y, batch_size=24, verbose=0)

    def reduce_in_replica():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.ones([1000]))

    step = tf.function(lambda: strategy.run(reduce_in_replica))
    step()
    # Nobody leaves while the other is still in the step.
    strategy.barrier()
    strategy.close()
    strategy.close()
    tell_threads("close")
    tell("fit", lambda: model.fit(x, y, batch_size=24, verbose=0))
    tell("step", step)
    tell("barrier", strategy.barrier)
    tell("from_chief", lambda: strategy.from_chief(y))
    tell("reduce", lambda: strategy.reduce("SUM", tf.ones([]), axis=None))
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
