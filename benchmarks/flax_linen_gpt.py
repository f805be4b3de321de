"""The GPT of `models.gpt` in linen with Flax's own partitioning: logical names and logical axis rules.

In: sizes, a mesh. Out: a linen module whose parameters are `nn.LogicallyPartitioned`, and the rules of the mesh.

    with nn.logical_axis_rules(rules(mesh)): GPT(config, mesh).apply(...)
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.linen.spmd import with_logical_constraint
from jax.sharding import Mesh

from benchmarks.plain_gpt import Metrics, token_loss
from models.gpt import Config

MATRIX = nn.initializers.lecun_normal()
TABLE = nn.initializers.normal(0.02)
ZEROS = nn.initializers.zeros
ONES = nn.initializers.ones


def rules(mesh: Mesh) -> list[tuple[str, str | None]]:
    """Logical axis rules for a mesh of data or fsdp, and perhaps tensor; `stream` is the residual stream's length."""
    names = set(mesh.axis_names)
    tensor = "tensor" if "tensor" in names else None
    return [
        ("batch", "fsdp" if "fsdp" in names else "data"),
        ("embed", "fsdp" if "fsdp" in names else None),
        *((name, tensor) for name in ("heads", "mlp", "vocab", "stream")),
        *((name, None) for name in ("length", "head_dim", "position", "layers")),
    ]


def norm(c: Config, name: str) -> nn.LayerNorm:
    """A layer normalisation over embed."""
    scale, bias = nn.with_logical_partitioning(ONES, ("embed",)), nn.with_logical_partitioning(ZEROS, ("embed",))
    return nn.LayerNorm(epsilon=1e-5, scale_init=scale, bias_init=bias, dtype=c.dtype, name=name)


class Attention(nn.Module):
    """Causal self-attention."""

    config: Config
    # Handed to every constraint: under an ambient mesh, Flax 0.12.8's DenseGeneral constrains its flattened kernel
    # by the names of the unflattened one and raises.
    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        c = self.config

        def heads(name: str, *, use_bias: bool = True) -> jax.Array:
            y = nn.DenseGeneral(
                (c.heads, c.head_dim),
                use_bias=use_bias,
                kernel_init=nn.with_logical_partitioning(MATRIX, ("embed", "heads", "head_dim")),
                bias_init=nn.with_logical_partitioning(ZEROS, ("heads", "head_dim")),
                name=name,
            )(x)
            return with_logical_constraint(y, ("batch", "length", "heads", "head_dim"), mesh=self.mesh)

        query, key, value = heads("query"), heads("key", use_bias=False), heads("value")
        return nn.DenseGeneral(
            c.embed,
            axis=(-2, -1),
            kernel_init=nn.with_logical_partitioning(MATRIX, ("heads", "head_dim", "embed")),
            bias_init=nn.with_logical_partitioning(ZEROS, ("embed",)),
            name="out",
        )(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class MLP(nn.Module):
    """Two matrix products with a gelu between."""

    config: Config
    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        c = self.config
        up = nn.with_logical_partitioning(MATRIX, ("embed", "mlp"))
        down = nn.with_logical_partitioning(MATRIX, ("mlp", "embed"))
        up_bias, down_bias = (nn.with_logical_partitioning(ZEROS, (name,)) for name in ("mlp", "embed"))
        x = nn.gelu(nn.Dense(c.mlp, kernel_init=up, bias_init=up_bias, name="up")(x))
        x = with_logical_constraint(x, ("batch", "length", "mlp"), mesh=self.mesh)
        return nn.Dense(c.embed, kernel_init=down, bias_init=down_bias, name="down")(x)


class Block(nn.Module):
    """One layer; the residual stream is the carry of a scan."""

    config: Config
    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """[batch, length, embed] to the same."""
        c, mesh, stream = self.config, self.mesh, ("batch", "stream", None)
        x = x + Attention(c, mesh, name="attention")(norm(c, "attention_norm")(x))
        x = with_logical_constraint(x, stream, mesh=mesh)
        x = x + MLP(c, mesh, name="mlp")(norm(c, "mlp_norm")(x))
        x = with_logical_constraint(x, stream, mesh=mesh)
        return x, None


class GPT(nn.Module):
    """The whole model."""

    config: Config
    mesh: Mesh

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Token ids [batch, length] to logits [batch, length, vocab]."""
        c = self.config
        table = nn.with_logical_partitioning(TABLE, ("vocab", "embed"))
        positions = nn.with_logical_partitioning(TABLE, ("position", "embed"))
        x = nn.Embed(c.vocab, c.embed, embedding_init=table, name="embed")(inputs)
        table: Any = self.param("positions", positions, (c.length, c.embed))
        x = x + table[None, : inputs.shape[1]]
        x = with_logical_constraint(x, ("batch", "stream", None), mesh=self.mesh)
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False) if c.remat else Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = stack(c, self.mesh, name="layers")(x, None)
        head = nn.with_logical_partitioning(TABLE, ("embed", "vocab"))
        logits = nn.Dense(c.vocab, use_bias=False, kernel_init=head, name="head")(norm(c, "norm")(x))
        return with_logical_constraint(logits, ("batch", "length", "vocab"), mesh=self.mesh)


def loss(params: Any, batch: Mapping[str, jax.Array], *, config: Config, mesh: Mesh) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy over tokens, and the metrics."""
    logits: Any = GPT(config, mesh).apply({"params": params}, batch["inputs"])
    return token_loss(logits, batch["targets"])
