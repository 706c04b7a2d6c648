"""Dropping an iterator while a thread reads ahead in it does not end the process."""

import signal
import sys

import pytest

from tests.support.fresh_python import run_program

# Memory that is given back is overwritten, so that whoever reads it later is caught.
# The pipeline is not rewritten, as one with a Python generator: see lasting_input.py.
OVERWRITE = {"MALLOC_PERTURB_": "165", "TF_CPP_MIN_LOG_LEVEL": "3"}
ITERATORS = 10
DROPS = f"""
import resource, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import tensorflow as tf
{{imports}}

def slowly(number):
    time.sleep(0.05)
    return number

options = tf.data.Options()
options.autotune.enabled = False
options.experimental_optimization.apply_default_optimizations = False
options.experimental_optimization.inject_prefetch = False
strategy = {{strategy}}
for _ in range({ITERATORS}):
    dataset = tf.data.Dataset.range(1000)
    dataset = dataset.map(lambda n: tf.numpy_function(slowly, [n], tf.int64))
    dataset = dataset.with_options(options).batch(1)
    iterator = iter({{distributed}})
    next(iterator)
    del dataset, iterator
print("all dropped")
"""
BY_DATASET = "strategy.experimental_distribute_dataset(dataset)"
BY_FUNCTION = "strategy.distribute_datasets_from_function(lambda _: dataset)"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs the GNU C library"
)


@pytest.mark.parametrize("distributed", [BY_DATASET, BY_FUNCTION])
def test_dropped_iterators_are_read_no_more(distributed):
    program = DROPS.format(
        imports="import tfdp",
        strategy='tfdp.DataParallelStrategy(["CPU:0"])',
        distributed=distributed,
    )
    done = run_program(program, environment=OVERWRITE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all dropped" in done.stdout


def test_a_stock_strategy_reads_what_is_gone():
    """Once this fails, TensorFlow has mended it and lasting_input.py can go."""
    program = DROPS.format(
        imports="",
        strategy='tf.distribute.MirroredStrategy(["CPU:0"])',
        distributed=BY_DATASET,
    )
    done = run_program(program, environment=OVERWRITE)
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
