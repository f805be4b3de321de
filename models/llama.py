"""A Llama-style model in NNX: rotary positions, grouped-query attention, SwiGLU, RMSNorm; no biases, no dropout.

In: token ids [batch, length]. Out: logits [batch, length, vocab]. The sizes are those of Llama 3.1, whose rescaling
of rotary frequencies for long contexts is left out: released weights would need it added.

    factory, loss, batch_spec = llama_405b()       # allocates nothing
    module = tiny()[0](nnx.Rngs(0))
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models import language
from shardlib import annotate

MATRIX = nnx.initializers.lecun_normal()
TABLE = nnx.initializers.normal(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes and options of a Llama; a static value.

    Args:
        layers, embed, heads, kv_heads, mlp, vocab: sizes; `heads` is a multiple of `kv_heads` and divides `embed`.
        length: of the sequences in the batch spec; the model itself takes any.
        rope_theta: base of the rotary wavelengths.
        tied: the head is the transposed embedding.
        remat: recompute each layer in the backward pass.
        dtype: of the computation; None follows the parameters, so that a plan's compute_dtype decides. Statistics of
            norms, softmax and the loss are float32 either way.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    length: int
    rope_theta: float = 500_000.0
    tied: bool = False
    remat: bool = False
    dtype: Any = None

    def __post_init__(self):
        if self.embed % self.heads or self.head_dim % 2:
            raise ValueError(f"embed={self.embed} does not split into heads={self.heads} of an even size")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.embed // self.heads


def rotary_table(length: int, head_dim: int, *, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position x theta^(-2i / head_dim), i in [0, head_dim / 2).

    Returns:
        two arrays [length, head_dim / 2], float32.

    Source: Su et al. 2021 (2104.09864) section 3.2.2.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (x[i], x[i + head_dim / 2]) by the angle of their position.

    Pairing the halves, rather than neighbours, permutes head_dim and changes no product of a query with a key.

    Args:
        x: [batch, length, heads, head_dim].
        table: what `rotary_table` made.
    """
    half = x.shape[-1] // 2
    cos, sin = (part[None, :, None, :] for part in table)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention whose keys and values have fewer heads than its queries."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        options: Any = {"dtype": c.dtype, "dot_general": annotate.dot_general, "rngs": rngs}
        project = functools.partial(nnx.LinearGeneral, c.embed, use_bias=False, **options)
        kv_init = annotate.nnx_logical(MATRIX, "embed", "kv_heads", "head_dim")
        query_init = annotate.nnx_logical(MATRIX, "embed", "heads", "head_dim")
        self.query = project((c.heads, c.head_dim), kernel_init=query_init)
        self.key = project((c.kv_heads, c.head_dim), kernel_init=kv_init)
        self.value = project((c.kv_heads, c.head_dim), kernel_init=kv_init)
        self.out = nnx.LinearGeneral(
            (c.heads, c.head_dim),
            c.embed,
            axis=(-2, -1),
            use_bias=False,
            kernel_init=annotate.nnx_logical(MATRIX, "heads", "head_dim", "embed"),
            **options,
        )

    def __call__(self, x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[batch, length, embed] to the same."""
        query = annotate.constrain(rotate(self.query(x), table), "batch", "length", "heads", "head_dim")
        key = annotate.constrain(rotate(self.key(x), table), "batch", "length", "kv_heads", "head_dim")
        value = annotate.constrain(self.value(x), "batch", "length", "kv_heads", "head_dim")
        x = annotate.attention(query, key, value, causal=True)
        return self.out(annotate.constrain(x, "batch", "length", "heads", "head_dim"))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer 2020 (2002.05202) section 2."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        options: Any = {"dtype": c.dtype, "dot_general": annotate.dot_general, "rngs": rngs}
        linear = functools.partial(nnx.Linear, use_bias=False, **options)
        widen = annotate.nnx_logical(MATRIX, "embed", "mlp")
        self.gate = linear(c.embed, c.mlp, kernel_init=widen)
        self.up = linear(c.embed, c.mlp, kernel_init=widen)
        self.down = linear(c.mlp, c.embed, kernel_init=annotate.nnx_logical(MATRIX, "mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] to the same."""
        x = annotate.constrain(nnx.silu(self.gate(x)) * self.up(x), "batch", "length", "mlp")
        return self.down(checkpoint_name(x, "mlp_hidden"))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[batch, length, embed] to the same."""
        x = x + checkpoint_name(self.attention(self.attention_norm(x), table), "attention_out")
        x = annotate.constrain(x, "batch", "length", "embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp_out")
        return annotate.constrain(x, "batch", "length", "embed")


class Llama(nnx.Module):
    """The whole model."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        table = annotate.nnx_logical(TABLE, "vocab", "embed")
        self.config = c
        self.embed = language.embedding(c.vocab, c.embed, dtype=c.dtype, embedding_init=table, rngs=rngs)
        self.layers = language.stack(functools.partial(Block, c), count=c.layers, rngs=rngs)
        self.norm = norm(c, rngs=rngs)
        if not c.tied:
            head = annotate.nnx_logical(TABLE, "embed", "vocab")
            options: Any = {"dtype": c.dtype, "dot_general": annotate.dot_general, "rngs": rngs}
            self.head = nnx.Linear(c.embed, c.vocab, use_bias=False, kernel_init=head, **options)

    def __call__(self, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Token ids [batch, length] to logits [batch, length, vocab]; nothing draws from the key."""
        c = self.config
        cos, sin = rotary_table(inputs.shape[1], c.head_dim, theta=c.rope_theta)
        table = (annotate.by_position(cos), annotate.by_position(sin))
        x = annotate.constrain(self.embed(inputs), "batch", "length", "embed")
        x = language.scan(lambda block, x, _: block(x, table), self.layers, x, remat=c.remat)
        x = self.norm(x)
        return language.attend(x, self.embed.embedding[...], dtype=c.dtype) if c.tied else self.head(x)


def norm(config: Config, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """A root-mean-square normalisation over embed; its statistics are float32."""
    scale = annotate.nnx_logical(nnx.initializers.ones, "embed")
    return nnx.RMSNorm(config.embed, epsilon=1e-5, dtype=config.dtype, scale_init=scale, rngs=rngs)


def build(config: Config, *, batch: int = 16) -> language.Example:
    """A function that makes the model, its loss and its batch; allocates nothing."""
    factory = functools.partial(Llama, config)
    return factory, language.nnx_loss(factory), language.batch_spec(batch=batch, length=config.length)


def tiny(*, batch: int = 16, **overrides: Any) -> language.Example:
    """A byte-level Llama of 0.85M parameters; `overrides` are fields of `Config`."""
    sizes: dict[str, Any] = {"layers": 4, "embed": 128, "heads": 4, "kv_heads": 2, "mlp": 384}
    common: dict[str, Any] = {"vocab": 256, "length": 128}
    return build(Config(**(sizes | common | overrides)), batch=batch)


# Sizes and rotary base: Grattafiori et al. 2024, "The Llama 3 Herd of Models" (2407.21783), table 3; vocabulary with
# its 256 special tokens: config.json of huggingface.co/meta-llama/Llama-3.1-8B. The batch of 405B is section 3.4.1's
# 16M tokens in sequences of 8,192; a quarter of it for the smaller two is our choice.


def llama_8b(*, batch: int = 512, **overrides: Any) -> language.Example:
    """Llama 3.1 8B, 8.03 billion parameters."""
    return _published(batch, {"layers": 32, "embed": 4096, "heads": 32, "mlp": 14336} | overrides)


def llama_70b(*, batch: int = 512, **overrides: Any) -> language.Example:
    """Llama 3.1 70B, 70.6 billion parameters."""
    return _published(batch, {"layers": 80, "embed": 8192, "heads": 64, "mlp": 28672} | overrides)


def llama_405b(*, batch: int = 2048, **overrides: Any) -> language.Example:
    """Llama 3.1 405B, 405.9 billion parameters."""
    return _published(batch, {"layers": 126, "embed": 16384, "heads": 128, "mlp": 53248} | overrides)


def _published(batch: int, sizes: dict[str, Any]) -> language.Example:
    common: dict[str, Any] = {"kv_heads": 8, "vocab": 128256, "length": 8192, "remat": True}
    return build(Config(**(common | sizes)), batch=batch)
