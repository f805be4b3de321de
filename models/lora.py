"""LoRA around any linen example: chosen kernels W gain adapters, y = x W + (alpha / rank) x A B; the base is frozen.

In: an example (module, loss, batch_spec) whose layers are `nn.Dense` or `nn.DenseGeneral`. Out: the same with
adapters, which are parameters of their own beside each kernel, named by the kernel's axes and "lora_rank".

    module, loss, batch_spec = wrap(gpt.small(), rank=4)
    trainer = Trainer(bind(module, loss, plan, batch_spec), optimizer, trainable=is_adapter)

Source: Hu et al. 2021 (2106.09685) section 4.1.
"""

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from models import gpt, language
from shardlib import annotate

RANK = "lora_rank"
KERNELS = ("query", "value")


class LoRA(nn.Module):
    """A base module with adapters; its parameters keep the paths that they have in the base.

    Args:
        base: the module to adapt.
        rank: r of A [in, r] and B [r, out]; B starts as zeros, so that nothing changes at first.
        alpha: scale of the adapters times rank.
        kernels: names of the layers to adapt.
    """

    base: nn.Module
    rank: int
    alpha: float
    kernels: tuple[str, ...]

    def setup(self):
        """Shares the base's scope: no level is added to any path."""
        nn.share_scope(self, self.base)

    def __call__(self, inputs: jax.Array, **options: Any) -> Any:
        """What the base makes of its first argument, adapters included."""
        base: Any = self.base
        with adapted(self):
            return base(inputs, **options)


def adapted(lora: LoRA) -> Any:
    """A context in which the chosen layers of any linen module add their adapters' output to their own."""

    def call(layer_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        y = layer_call(*args, **kwargs)
        if layer.name not in lora.kernels or context.method_name != "__call__":
            return y
        if not isinstance(layer, nn.Dense | nn.DenseGeneral):
            raise TypeError(f"LoRA adapts nn.Dense and nn.DenseGeneral, and {layer.name} is {type(layer).__name__}")
        return y + lora.alpha / lora.rank * _low_rank(layer, args[0], rank=lora.rank).reshape(y.shape).astype(y.dtype)

    return nn.intercept_methods(call)


def _low_rank(layer: Any, x: jax.Array, *, rank: int) -> jax.Array:
    """x A B, the input dims and the output dims flat; the adapters are parameters of the layer."""
    kernel = layer.get_variable("params", "kernel")
    names = kernel.names if isinstance(kernel, nn.Partitioned) else (None,) * meta.unbox(kernel).ndim
    shape = meta.unbox(kernel).shape
    axis = getattr(layer, "axis", -1)
    num_in = len(axis) if isinstance(axis, tuple) else 1
    fan_in = math.prod(shape[:num_in])
    down = annotate.logical(nn.initializers.normal(fan_in**-0.5), *names[:num_in], RANK)
    up = annotate.logical(nn.initializers.zeros, RANK, *names[num_in:])
    a = layer.param("lora_a", down, (*shape[:num_in], rank)).astype(x.dtype)
    b = layer.param("lora_b", up, (rank, *shape[num_in:])).astype(x.dtype)
    axes = tuple(dim % x.ndim for dim in (axis if isinstance(axis, tuple) else (axis,)))
    return jnp.tensordot(jnp.tensordot(x, a, (axes, tuple(range(num_in)))), b, 1)


def is_adapter(path: str, axes: tuple[str | None, ...]) -> bool:
    """The predicate of what is trained, for `trainable=`."""
    return RANK in axes


def wrap(
    example: language.Example, *, rank: int = 4, alpha: float | None = None, kernels: tuple[str, ...] = KERNELS
) -> language.Example:
    """A linen example with adapters on the kernels of the layers so named; allocates nothing.

    Args:
        example: module, loss and batch spec; the loss may use the module as it likes.
        rank: of the adapters.
        alpha: scale of the adapters times rank; by default rank.
        kernels: names of the layers to adapt.
    """
    module, base_loss, batch_spec = example
    lora = LoRA(module, rank, float(rank if alpha is None else alpha), kernels)

    def loss(params: Any, batch: Mapping[str, Any], rng: jax.Array | None) -> Any:
        with adapted(lora):
            return base_loss(params, batch, rng)

    return lora, loss, batch_spec


def small(*, batch: int = 16, rank: int = 4, **overrides: Any) -> language.Example:
    """The small GPT with adapters on queries and values; `overrides` are fields of `models.gpt.Config`."""
    return wrap(gpt.small(batch=batch, **overrides), rank=rank)


def with_adapters(base_params: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the wrapped module with the base's arrays, the same buffers, and the adapters of `params`.

    Args:
        base_params: the base's parameters, placed or not.
        params: parameters of the wrapped module; only the adapters are used.
    """
    merged: dict[str, Any] = {}
    for name, own in params.items():
        have = base_params.get(name)
        merged[name] = with_adapters(have or {}, own) if isinstance(own, Mapping) else own if have is None else have
    return merged
