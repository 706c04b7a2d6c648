#!/usr/bin/env bash
# JAX 0.10.2, CPU: jnp.max of an array with a NaN is NaN, and of the same array divided over devices
# it is a number.
#
# The maximum over devices (also lax.pmax and lax.pmin) takes a NaN for nothing, whereas that within
# a device keeps it. A device whose part holds a NaN loses its other numbers too: the maximum of
# [NaN, 9], [1, 2] on two devices is 2, smaller than the 9 that is there. So a check such as
# jnp.max(jnp.abs(gradient)) for finite values passes, if the gradient is sharded. jnp.sum and
# lax.psum are NaN in all cases; isfinite(...).all() is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2"
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2
"$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

values = np.array([np.nan, 9.0, 1.0, 2.0], "float32")
mesh = jax.make_mesh((2,), ("devices",))
sharded = jax.device_put(values, NamedSharding(mesh, PartitionSpec("devices")))
maximum = jax.jit(jnp.max)


def over_devices(function):
    def call(part):
        return function(jnp.max(part), "devices")

    return float(
        jax.jit(
            jax.shard_map(
                call, mesh=mesh, in_specs=PartitionSpec("devices"), out_specs=PartitionSpec()
            )
        )(sharded)
    )


print("jax", jax.__version__)
seen = [
    float(maximum(values)),
    float(maximum(sharded)),
    over_devices(jax.lax.pmax),
    float(jax.jit(jnp.sum)(sharded)),
]
print("maximum of [NaN, 9, 1, 2]:           ", seen[0])
print("the same on two devices:             ", seen[1])
print("lax.pmax of the devices' maxima:     ", seen[2])
print("sum on two devices:                  ", seen[3])
if not np.isnan(seen[0]) or seen[1:3] != [2.0, 2.0] or not np.isnan(seen[3]):
    raise SystemExit("changed")
PYTHON
