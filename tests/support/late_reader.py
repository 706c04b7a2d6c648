"""A worker that fails while the pipeline of its input is in a call of Python.

    python -m tests.support.late_reader SECONDS

Worker 1 leaves; worker 0 hears of it in a step, and dies of it while a thread of
TensorFlow's, which reads ahead, is inside of tfdp for so many seconds more.
"""

import sys
import time

import tfdp
from tests.support import lost_worker
from tests.support.parity import classification_data, dense_model
from tfdp.data import same_batches

# A batch that no step has asked for when worker 1 leaves.
AHEAD = 5


def main():
    seconds = float(sys.argv[1])
    look = same_batches._Comparison.look

    def slow_look(self, iterator, count, is_batch, told):
        found = look(self, iterator, count, is_batch, told)
        # The other worker leaves after four steps; the fifth waits for it meanwhile.
        if int(count) == AHEAD:
            print("reads ahead", flush=True)
            time.sleep(seconds)
            print("has read ahead", flush=True)
        return found

    same_batches._Comparison.look = slow_look
    sys.argv[1:] = ["leave"]
    strategy = tfdp.MultiHostDataParallelStrategy()
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = classification_data(96)
    callbacks = [lost_worker.Fail()] if strategy.cluster.rank == 1 else []
    model.fit(x, y, batch_size=12, epochs=50, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
