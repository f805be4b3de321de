"""A GPT in linen: learned positions, normalisation before each sub-layer, a stack of equal layers under one scan.

In: token ids [batch, length]. Out: logits [batch, length, vocab].

    module, loss, batch_spec = small()
    module, loss, batch_spec = small(layers=2, dropout=0.1, tied=True)
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from models import language
from shardlib import annotate
from shardlib.loss import Loss

MATRIX = nn.initializers.lecun_normal()
TABLE = nn.initializers.normal(0.02)
ZEROS = nn.initializers.zeros
ONES = nn.initializers.ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes and options of a GPT; a static value.

    Args:
        layers, embed, heads, mlp, vocab: sizes; `heads` divides `embed`.
        length: number of learned positions, the longest sequence.
        dropout: rate after the embedding and after each sub-layer, used when the loss gets a key.
        tied: the head is the transposed embedding.
        bias: biases in projections and norms. Keys have none: softmax ignores it, so that its gradient is zero.
        remat: recompute each layer in the backward pass.
        dtype: of the computation; None follows the parameters, so that a plan's compute_dtype decides. Statistics of
            norms, softmax and the loss are float32 either way.
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    vocab: int
    length: int
    dropout: float = 0.0
    tied: bool = False
    bias: bool = True
    remat: bool = False
    dtype: Any = None

    def __post_init__(self):
        if self.embed % self.heads:
            raise ValueError(f"embed={self.embed} is not divisible by heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.embed // self.heads

    def check_length(self, length: int) -> None:
        """Raises ValueError for a sequence longer than the learned positions."""
        if length > self.length:
            raise ValueError(f"a sequence of {length} tokens exceeds the {self.length} learned positions of this GPT")


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value projections."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        c = self.config
        query = annotate.constrain(self.project("query", "heads", c.bias)(x), "batch", "length", "heads", "head_dim")
        key = annotate.constrain(self.project("key", "kv_heads", False)(x), "batch", "length", "kv_heads", "head_dim")
        value = self.project("value", "kv_heads", c.bias)(x)
        value = annotate.constrain(value, "batch", "length", "kv_heads", "head_dim")
        x = annotate.attention(query, key, value, causal=True)
        x = annotate.constrain(x, "batch", "length", "heads", "head_dim")
        return nn.DenseGeneral(
            c.embed,
            axis=(-2, -1),
            use_bias=c.bias,
            dtype=c.dtype,
            kernel_init=annotate.logical(MATRIX, "heads", "head_dim", "embed"),
            bias_init=annotate.logical(ZEROS, "embed"),
            dot_general=annotate.dot_general,
            name="out",
        )(x)

    def project(self, name: str, heads: str, bias: bool) -> nn.DenseGeneral:
        """The projection from [.., embed] to [.., heads, head_dim], its heads named `heads`."""
        return nn.DenseGeneral(
            (self.config.heads, self.config.head_dim),
            use_bias=bias,
            dtype=self.config.dtype,
            kernel_init=annotate.logical(MATRIX, "embed", heads, "head_dim"),
            bias_init=annotate.logical(ZEROS, heads, "head_dim"),
            dot_general=annotate.dot_general,
            name=name,
        )


class MLP(nn.Module):
    """Two matrix products with a gelu between."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        c = self.config
        dense = functools.partial(nn.Dense, use_bias=c.bias, dtype=c.dtype, dot_general=annotate.dot_general)
        up = annotate.logical(MATRIX, "embed", "mlp")
        down = annotate.logical(MATRIX, "mlp", "embed")
        x = dense(c.mlp, kernel_init=up, bias_init=annotate.logical(ZEROS, "mlp"), name="up")(x)
        x = annotate.constrain(nn.gelu(x), "batch", "length", "mlp")
        x = checkpoint_name(x, "mlp_hidden")
        return dense(c.embed, kernel_init=down, bias_init=annotate.logical(ZEROS, "embed"), name="down")(x)


class Block(nn.Module):
    """One layer, in the form a scan wants: the residual stream is the carry."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """[batch, length, embed] to the same."""
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        update = Attention(c, name="attention")(norm(c, "attention_norm")(x))
        x = annotate.constrain(x + dropout(checkpoint_name(update, "attention_out")), "batch", "length", "embed")
        update = MLP(c, name="mlp")(norm(c, "mlp_norm")(x))
        x = annotate.constrain(x + dropout(checkpoint_name(update, "mlp_out")), "batch", "length", "embed")
        return x, None


class GPT(nn.Module):
    """The whole model."""

    config: Config

    @nn.compact
    def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Token ids [batch, length] to logits [batch, length, vocab]; dropout draws from the rng "dropout"."""
        c = self.config
        c.check_length(inputs.shape[1])
        table = annotate.logical(TABLE, "vocab", "embed")
        embed = nn.Embed(c.vocab, c.embed, dtype=c.dtype, embedding_init=table, name="embed")
        positions = self.param("positions", annotate.logical(TABLE, "position", "embed"), (c.length, c.embed))
        x = embed(inputs)
        x = x + annotate.by_position(positions[: inputs.shape[1]])[None].astype(x.dtype)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(annotate.constrain(x, "batch", "length", "embed"))
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False) if c.remat else Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: annotate.LAYERS},
        )
        x, _ = stack(c, deterministic, name="layers")(x, None)
        x = norm(c, "norm")(x)
        if c.tied:
            return language.attend(x, embed.embedding, dtype=c.dtype)
        head = annotate.logical(TABLE, "embed", "vocab")
        dense = functools.partial(nn.Dense, use_bias=False, dtype=c.dtype, dot_general=annotate.dot_general)
        return dense(c.vocab, kernel_init=head, name="head")(x)


def norm(config: Config, name: str) -> nn.LayerNorm:
    """A layer normalisation over embed; its statistics are float32."""
    return nn.LayerNorm(
        epsilon=1e-5,
        use_bias=config.bias,
        dtype=config.dtype,
        scale_init=annotate.logical(ONES, "embed"),
        bias_init=annotate.logical(ZEROS, "embed"),
        name=name,
    )


def build(config: Config, *, batch: int = 16) -> language.Example:
    """The model, its loss and its batch; allocates nothing."""
    module = GPT(config)

    def loss(params: Any, batch: Mapping[str, Any], rng: jax.Array | None) -> Loss:
        drop = rng is not None and config.dropout > 0
        rngs: Any = {"dropout": rng} if drop else None
        logits: Any = module.apply({"params": params}, batch["inputs"], deterministic=not drop, rngs=rngs)
        return language.token_loss(logits, batch)

    return module, loss, language.batch_spec(batch=batch, length=config.length)


def small(*, batch: int = 16, **overrides: Any) -> language.Example:
    """A byte-level GPT of 0.87M parameters; `overrides` are fields of `Config`."""
    return build(small_config(**overrides), batch=batch)


def small_config(**overrides: Any) -> Config:
    """The sizes of `small`."""
    sizes: dict[str, Any] = {"layers": 4, "embed": 128, "heads": 4, "mlp": 512, "vocab": 256, "length": 128}
    return Config(**(sizes | overrides))
