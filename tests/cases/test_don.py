"""Field troubles, group DON: donation. In a subprocess, since the trouble kills the process."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
import dataclasses
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import shardlib as sl

init = sl.annotate.nnx_logical(nnx.initializers.normal(), "vocab", "embed")

class Tied(nnx.Module):
    def __init__(self, rngs):
        self.emb = nnx.Param(init(rngs.params(), (64, 32), jnp.float32))
        self.head = nnx.Param(init(rngs.params(), (64, 32), jnp.float32))

spec = {"ids": sl.ArraySpec(shape=(8,), dtype="int32", axes=("batch",))}
loss = lambda params, batch, rng: (params["emb"][batch["ids"]] * params["head"][batch["ids"]]).sum()
trainer = sl.Trainer(sl.bind(Tied, loss, sl.Plan(mesh="data=8"), spec), optax.sgd(1.0))
state = trainer.init(jax.random.key(0))
replicated = jax.NamedSharding(trainer.mesh, jax.sharding.PartitionSpec())
table = jax.device_put(jnp.arange(64.0)[:, None] + jnp.zeros((1, 32)), replicated)
params = jax.tree.map(lambda _: table, state.params)
state = dataclasses.replace(state, params=params)
state, metrics = trainer.step(state, {"ids": np.arange(8, dtype=np.int32)})
rows = np.arange(8.0)
assert float(metrics["loss"]) == 32 * (rows**2).sum(), metrics
for name in ("emb", "head"):
    found = np.asarray(state.params[name][...])
    np.testing.assert_array_equal(found[:8], 0)  # row - gradient, which is the other table's row
    np.testing.assert_array_equal(found[8:, 0], np.arange(8.0, 64.0))
print("done")
"""


@pytest.mark.newest
def test_don_01_one_buffer_under_two_leaves():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
