"""The GPT of `models.gpt` in NNX: the same sizes, the same parameter paths, the same numbers.

In: token ids [batch, length] and a key for dropout or None. Out: logits [batch, length, vocab]. The module holds
parameters only; as it stands in `(module, loss, batch_spec)` it is a function from `nnx.Rngs` to the module.

    factory, loss, batch_spec = small()
    module = factory(nnx.Rngs(0))
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models import gpt, language
from models.gpt import MATRIX, ONES, TABLE, ZEROS, Config
from shardlib import annotate


class Attention(nnx.Module):
    """Causal self-attention with separate query, key and value projections."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.query = project(c, "heads", use_bias=c.bias, rngs=rngs)
        self.key = project(c, "kv_heads", use_bias=False, rngs=rngs)
        self.value = project(c, "kv_heads", use_bias=c.bias, rngs=rngs)
        self.out = nnx.LinearGeneral(
            (c.heads, c.head_dim),
            c.embed,
            axis=(-2, -1),
            use_bias=c.bias,
            dtype=c.dtype,
            kernel_init=annotate.nnx_logical(MATRIX, "heads", "head_dim", "embed"),
            bias_init=annotate.nnx_logical(ZEROS, "embed"),
            dot_general=annotate.dot_general,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        query = annotate.constrain(self.query(x), "batch", "length", "heads", "head_dim")
        key = annotate.constrain(self.key(x), "batch", "length", "kv_heads", "head_dim")
        value = annotate.constrain(self.value(x), "batch", "length", "kv_heads", "head_dim")
        x = annotate.attention(query, key, value, causal=True)
        return self.out(annotate.constrain(x, "batch", "length", "heads", "head_dim"))


def project(config: Config, heads: str, *, use_bias: bool, rngs: nnx.Rngs) -> nnx.LinearGeneral:
    """The projection from [.., embed] to [.., heads, head_dim], its heads named `heads`."""
    return nnx.LinearGeneral(
        config.embed,
        (config.heads, config.head_dim),
        use_bias=use_bias,
        dtype=config.dtype,
        kernel_init=annotate.nnx_logical(MATRIX, "embed", heads, "head_dim"),
        bias_init=annotate.nnx_logical(ZEROS, heads, "head_dim"),
        dot_general=annotate.dot_general,
        rngs=rngs,
    )


class MLP(nnx.Module):
    """Two matrix products with a gelu between."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        options: Any = {"dtype": c.dtype, "dot_general": annotate.dot_general, "rngs": rngs}
        linear = functools.partial(nnx.Linear, use_bias=c.bias, **options)
        up, down = annotate.nnx_logical(MATRIX, "embed", "mlp"), annotate.nnx_logical(MATRIX, "mlp", "embed")
        self.up = linear(c.embed, c.mlp, kernel_init=up, bias_init=annotate.nnx_logical(ZEROS, "mlp"))
        self.down = linear(c.mlp, c.embed, kernel_init=down, bias_init=annotate.nnx_logical(ZEROS, "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        x = annotate.constrain(nnx.gelu(self.up(x)), "batch", "length", "mlp")
        return self.down(checkpoint_name(x, "mlp_hidden"))


def norm(config: Config, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A layer normalisation over embed; its statistics are float32."""
    return nnx.LayerNorm(
        config.embed,
        epsilon=1e-5,
        use_bias=config.bias,
        dtype=config.dtype,
        scale_init=annotate.nnx_logical(ONES, "embed"),
        bias_init=annotate.nnx_logical(ZEROS, "embed"),
        rngs=rngs,
    )


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """[batch, length, embed] to the same; the layer's own key, or None for no dropout."""
        keys = (None, None) if key is None else jax.random.split(key)
        update = checkpoint_name(self.attention(self.attention_norm(x)), "attention_out")
        x = annotate.constrain(x + self.drop(update, keys[0]), "batch", "length", "embed")
        update = checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp_out")
        return annotate.constrain(x + self.drop(update, keys[1]), "batch", "length", "embed")

    def drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Dropout, or x when there is no key."""
        return self.dropout(x, deterministic=key is None, rngs=key)


class GPT(nnx.Module):
    """The whole model."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        table = annotate.nnx_logical(TABLE, "vocab", "embed")
        self.config = c
        self.embed = language.embedding(c.vocab, c.embed, dtype=c.dtype, embedding_init=table, rngs=rngs)
        positions = annotate.nnx_logical(TABLE, "position", "embed")
        self.positions = nnx.Param(positions(rngs.params(), (c.length, c.embed), jnp.float32))
        self.dropout = nnx.Dropout(c.dropout)
        self.layers = language.stack(functools.partial(Block, c), count=c.layers, rngs=rngs)
        self.norm = norm(c, rngs=rngs)
        if not c.tied:
            head = annotate.nnx_logical(TABLE, "embed", "vocab")
            options: Any = {"dtype": c.dtype, "dot_general": annotate.dot_general, "rngs": rngs}
            self.head = nnx.Linear(c.embed, c.vocab, use_bias=False, kernel_init=head, **options)

    def __call__(self, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Token ids [batch, length] to logits [batch, length, vocab]; without a key there is no dropout."""
        c = self.config
        c.check_length(inputs.shape[1])
        first, rest = (None, None) if key is None or c.dropout == 0 else jax.random.split(key)
        x = self.embed(inputs)
        x = x + annotate.by_position(self.positions[: inputs.shape[1]])[None].astype(x.dtype)
        x = annotate.constrain(x, "batch", "length", "embed")
        x = self.dropout(x, deterministic=first is None, rngs=first)
        keys = None if rest is None else jax.random.split(rest, c.layers)
        x = language.scan(Block.__call__, self.layers, x, per_layer=keys, remat=c.remat)
        x = self.norm(x)
        return language.attend(x, self.embed.embedding[...], dtype=c.dtype) if c.tied else self.head(x)


def build(config: Config, *, batch: int = 16) -> language.Example:
    """A function that makes the model, its loss and its batch; allocates nothing."""
    factory = functools.partial(GPT, config)
    return factory, language.nnx_loss(factory), language.batch_spec(batch=batch, length=config.length)


def small(*, batch: int = 16, **overrides: Any) -> language.Example:
    """The sizes of `models.gpt:small`; `overrides` are fields of `Config`."""
    return build(gpt.small_config(**overrides), batch=batch)
