"""A small model and its compiled train steps, for tests of what moves between devices; each is compiled once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib import annotate
from shardlib.audit.hlo import parse
from shardlib.audit.program import Program
from shardlib.binding import Bound

# The communication is decided before the backend optimises loops: no need to wait for that.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
GPT = {"layers": 2, "embed": 32, "heads": 4, "mlp": 64, "vocab": 96, "length": 16}


class MLP(nnx.Module):
    """Two products with a residual: leaves that fsdp splits and one that it does not."""

    def __init__(self, rngs: nnx.Rngs, *, embed: int, mlp: int):
        def parameter(*named: tuple[str, int]) -> nnx.Param:
            shape = tuple(size for _, size in named)
            value = jax.random.normal(rngs.params(), shape) * 0.1
            return nnx.Param(value, logical_axes=tuple(name for name, _ in named))

        self.scale = parameter(("embed", embed))
        self.up = parameter(("embed", embed), ("mlp", mlp))
        self.bias = parameter(("mlp", mlp))
        self.down = parameter(("mlp", mlp), ("embed", embed))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = annotate.constrain(x, "batch", "embed")
        h = jax.nn.relu((x * self.scale.astype(x.dtype)[None]) @ self.up.astype(x.dtype) + self.bias[None])
        return x + annotate.constrain(h, "batch", "mlp") @ self.down.astype(x.dtype)


def example(*, embed: int = 16, mlp: int = 24, batch: int = 32, dtype: Any = jnp.float32) -> Any:
    """The model, a weighted loss with one metric, and its batch."""
    factory = functools.partial(MLP, embed=embed, mlp=mlp)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))

    def loss(params: Any, batch: Any, rng: Any) -> sl.Loss:
        y = nnx.merge(graphdef, params)(batch["x"].astype(dtype)).astype(jnp.float32)
        rows = jnp.square(y).mean(axis=-1)
        weight = batch["weights"].sum()
        return sl.Loss(total=(rows * batch["weights"]).sum(), weight=weight, aux={"size": sl.Mean(rows.sum(), weight)})

    spec = {
        "x": sl.ArraySpec(shape=(batch, embed), dtype="float32", axes=("batch", None)),
        "weights": sl.ArraySpec(shape=(batch,), dtype="float32", axes=("batch",)),
    }
    return factory, loss, spec


def bound(mesh: str, *, model: Any = None, **plan: Any) -> Bound:
    """The small model under a plan."""
    factory, loss, spec = model or example()
    return sl.bind(factory, loss, sl.Plan(mesh=mesh, **plan), spec)


@functools.cache
def program(mesh: str, *, optimizer: Any = None, **plan: Any) -> tuple[Bound, Program]:
    """The small model under an explicit plan, and its compiled train step."""
    found = bound(mesh, **({"lowering": "explicit"} | plan))
    return found, compiled(sl.Trainer(found, optimizer or optax.adam(1e-3)).lowered)


@functools.cache
def gpt_program(mesh: str, **plan: Any) -> tuple[Bound, Program]:
    """A micro GPT under a plan, and its compiled train step."""
    found = bound(mesh, model=gpt.build(gpt.Config(**GPT)), **plan)
    return found, compiled(sl.Trainer(found, optax.adam(1e-3)).lowered)


def compiled(lowered: Any) -> Program:
    """The collectives of a lowered program."""
    return parse(lowered.compile(compiler_options=QUICK).as_text())
