"""The GPT of `models.gpt` in NNX with Flax's own sharding metadata: `nnx.with_partitioning`, rules, an ambient mesh.

In: sizes. Out: an NNX module whose variables carry `out_sharding`; rules are those of `flax_linen_gpt`.

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules(mesh)): ...
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import get_logical_axis_rules
from jax.sharding import PartitionSpec as P

from benchmarks.flax_linen_gpt import MATRIX, ONES, TABLE, ZEROS
from benchmarks.plain_gpt import Metrics, token_loss
from models.gpt import Config


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an activation by the rules in force; NNX has them for variables only."""
    rules = dict(get_logical_axis_rules())
    return jax.lax.with_sharding_constraint(x, P(*(rules[name] if name else None for name in names)))


def norm(c: Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A layer normalisation over embed."""
    scale, bias = nnx.with_partitioning(ONES, ("embed",)), nnx.with_partitioning(ZEROS, ("embed",))
    return nnx.LayerNorm(c.embed, epsilon=1e-5, scale_init=scale, bias_init=bias, dtype=c.dtype, rngs=rngs)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        def project(*, use_bias: bool) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                c.embed,
                (c.heads, c.head_dim),
                use_bias=use_bias,
                kernel_init=nnx.with_partitioning(MATRIX, ("embed", "heads", "head_dim")),
                bias_init=nnx.with_partitioning(ZEROS, ("heads", "head_dim")),
                rngs=rngs,
            )

        self.query, self.key, self.value = project(use_bias=True), project(use_bias=False), project(use_bias=True)
        self.out = nnx.LinearGeneral(
            (c.heads, c.head_dim),
            c.embed,
            axis=(-2, -1),
            kernel_init=nnx.with_partitioning(MATRIX, ("heads", "head_dim", "embed")),
            bias_init=nnx.with_partitioning(ZEROS, ("embed",)),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        query, key, value = (
            constrain(project(x), "batch", "length", "heads", "head_dim")
            for project in (self.query, self.key, self.value)
        )
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class MLP(nnx.Module):
    """Two matrix products with a gelu between."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        up, down = nnx.with_partitioning(MATRIX, ("embed", "mlp")), nnx.with_partitioning(MATRIX, ("mlp", "embed"))
        up_bias, down_bias = (nnx.with_partitioning(ZEROS, (name,)) for name in ("mlp", "embed"))
        self.up = nnx.Linear(c.embed, c.mlp, kernel_init=up, bias_init=up_bias, rngs=rngs)
        self.down = nnx.Linear(c.mlp, c.embed, kernel_init=down, bias_init=down_bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        return self.down(constrain(nnx.gelu(self.up(x)), "batch", "length", "mlp"))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.attention_norm, self.attention = norm(c, rngs), Attention(c, rngs)
        self.mlp_norm, self.mlp = norm(c, rngs), MLP(c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        x = constrain(x + self.attention(self.attention_norm(x)), "batch", "stream", None)
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", "stream", None)


class GPT(nnx.Module):
    """The whole model."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(c, rngs)

        table, positions, head = (
            nnx.with_partitioning(TABLE, names)
            for names in (("vocab", "embed"), ("position", "embed"), ("embed", "vocab"))
        )
        self.remat = c.remat
        self.embed = nnx.Embed(c.vocab, c.embed, embedding_init=table, rngs=rngs)
        self.positions = nnx.Param(positions(rngs.params(), (c.length, c.embed), jnp.float32))
        self.layers = stack(rngs)
        self.norm = norm(c, rngs)
        self.head = nnx.Linear(c.embed, c.vocab, use_bias=False, kernel_init=head, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Token ids [batch, length] to logits [batch, length, vocab]."""
        x = self.embed(inputs) + self.positions[None, : inputs.shape[1]]
        x = constrain(x, "batch", "stream", None)

        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        layer = nnx.remat(layer, prevent_cse=False) if self.remat else layer
        metadata = {nnx.PARTITION_NAME: "layers"}
        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=metadata)
        return constrain(self.head(self.norm(scan(x, self.layers))), "batch", "length", "vocab")


def loss(model: GPT, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy over tokens, and the metrics."""
    return token_loss(model(batch["inputs"]), batch["targets"])
