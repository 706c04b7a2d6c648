"""Every Python that a test starts runs this first: less comes with TensorFlow.

TensorFlow and Keras import jax, matplotlib and scikit-learn where they are installed,
for models of JAX, galleries of images and scikit-learn's wrappers, and do without
where they are not: 2.0 of 4.3 seconds of processor time in each process. A program
that imports one of them itself, before or after, gets it.

Garbage is looked for less often: a tenth of what tests take, and 0.4 seconds of each
import, were searches that found little. Nothing may depend on when they come.

Compiled modules are kept, also where PYTHONDONTWRITEBYTECODE is set, as in many images
of containers: each process compiled all of tfdp anew, 0.3 seconds, and each of pytest
all tests, 4 seconds.

Python finds it by PYTHONPATH, which tests/conftest.py sets. It imports nothing of the
project: a test may be about just that.
"""

import gc
import sys

#: As in `tfdp/strategies/quiet.py`.
NOT_NEEDED_FOR_A_STEP = ("jax", "matplotlib", "sklearn")
FRAMEWORKS = ("tensorflow", "keras")
OBJECTS_BETWEEN_SEARCHES = 50_000


class NotNeeded:
    """A finder: they are not installed while TensorFlow or Keras is imported."""

    def find_spec(self, name, path=None, target=None):
        if name in NOT_NEEDED_FOR_A_STEP and any(map(is_imported_now, FRAMEWORKS)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def is_imported_now(package):
    spec = getattr(sys.modules.get(package), "__spec__", None)
    return getattr(spec, "_initializing", False)


# Twice in pytest's own processes: by conftest.py, and where one was started by another.
if not any(type(finder).__name__ == "NotNeeded" for finder in sys.meta_path):
    sys.meta_path.insert(0, NotNeeded())
sys.dont_write_bytecode = False
gc.set_threshold(OBJECTS_BETWEEN_SEARCHES, 20, 100)
