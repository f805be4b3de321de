"""A byte-level recurrent language model in linen: SRU or QRNN layers under one scan, no positions to learn.

In: token ids [batch, length], and for packed documents positions [batch, length]. Out: logits [batch, length, vocab].

    module, loss, batch_spec = small()
    module, loss, batch_spec = small(cell="qrnn", width=3, packed=True)    # batches of shardlib.data.packing.pack
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from models import language
from shardlib import annotate
from shardlib.batch_spec import ArraySpec
from shardlib.layers.recurrent import QRNN, SRU
from shardlib.loss import Loss

Cell = Literal["sru", "qrnn"]
MATRIX = nn.initializers.lecun_normal()
TABLE = nn.initializers.normal(0.02)
ZEROS = nn.initializers.zeros
ONES = nn.initializers.ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes and options of a recurrent language model; a static value.

    Args:
        layers, embed, mlp, vocab: sizes; `mlp` is the number of hidden units of a layer.
        cell: kind of the layers.
        width: steps that a QRNN's convolution sees; an SRU has none.
        dropout: rate after the embedding and after each layer, used when the loss gets a key.
        tied: the head is the transposed embedding.
        remat: recompute each layer in the backward pass.
        dtype: of the computation; None follows the parameters. Gates, cells, norms and the loss are float32 either way.
    """

    layers: int
    embed: int
    mlp: int
    vocab: int
    cell: Cell = "sru"
    width: int = 2
    dropout: float = 0.0
    tied: bool = False
    remat: bool = False
    dtype: Any = None

    def __post_init__(self):
        if self.cell not in get_args(Cell):
            raise ValueError(f"cell={self.cell!r} is not one of {get_args(Cell)}")
        if self.width < 1:
            raise ValueError(f"width={self.width} is not positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")


class Block(nn.Module):
    """One layer, in the form a scan wants: the residual stream is the carry, positions are the same for all layers."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, None]:
        """[batch, length, embed] to the same."""
        c = self.config
        if c.cell == "sru":
            cell = SRU(c.mlp, dtype=c.dtype, name="cell")
        else:
            cell = QRNN(c.mlp, width=c.width, dtype=c.dtype, name="cell")
        hidden, _ = cell(norm(c, "norm")(x), positions=positions)
        update = nn.Dense(
            c.embed,
            dtype=c.dtype,
            kernel_init=annotate.logical(MATRIX, "mlp", "embed"),
            bias_init=annotate.logical(ZEROS, "embed"),
            dot_general=annotate.dot_general,
            name="down",
        )(checkpoint_name(hidden, "mlp_hidden"))
        update = nn.Dropout(c.dropout, deterministic=self.deterministic)(checkpoint_name(update, "mlp_out"))
        return annotate.constrain(x + update, "batch", "length", "embed"), None


class RNN(nn.Module):
    """The whole model."""

    config: Config

    @nn.compact
    def __call__(
        self, inputs: jax.Array, *, positions: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """Token ids [batch, length] to logits [batch, length, vocab]; dropout draws from the rng "dropout".

        Args:
            positions: [batch, length], integer, 0 where a document begins; None for one document a row.
        """
        c = self.config
        table = annotate.logical(TABLE, "vocab", "embed")
        embed = nn.Embed(c.vocab, c.embed, dtype=c.dtype, embedding_init=table, name="embed")
        x = annotate.constrain(embed(inputs), "batch", "length", "embed")
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
        same_positions: Any = nn.broadcast  # Flax's own type for in_axes leaves it out
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False) if c.remat else Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=same_positions,
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: annotate.LAYERS},
        )
        x, _ = stack(c, deterministic, name="layers")(x, positions)
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
        dtype=config.dtype,
        scale_init=annotate.logical(ONES, "embed"),
        bias_init=annotate.logical(ZEROS, "embed"),
        name=name,
    )


def build(config: Config, *, batch: int = 16, length: int = 128, packed: bool = False) -> language.Example:
    """The model, its loss and its batch; allocates nothing.

    Args:
        packed: batches hold "positions", int32, and "weights", float32, as packed documents do.
    """
    module = RNN(config)
    spec = language.batch_spec(batch=batch, length=length)
    if packed:
        of_token = {"shape": (batch, length), "axes": ("batch", "length")}
        spec["positions"] = ArraySpec(dtype="int32", **of_token)
        spec["weights"] = ArraySpec(dtype="float32", **of_token)

    def loss(params: Any, batch: Mapping[str, Any], rng: jax.Array | None) -> Loss:
        drop = rng is not None and config.dropout > 0
        rngs: Any = {"dropout": rng} if drop else None
        options: Any = {"positions": batch.get("positions"), "deterministic": not drop, "rngs": rngs}
        logits: Any = module.apply({"params": params}, batch["inputs"], **options)
        return language.token_loss(logits, batch)

    return module, loss, spec


def small(*, batch: int = 16, length: int = 128, packed: bool = False, **overrides: Any) -> language.Example:
    """A byte-level SRU of 0.72M parameters; `overrides` are fields of `Config`."""
    sizes: dict[str, Any] = {"layers": 4, "embed": 128, "mlp": 256, "vocab": 256}
    return build(Config(**(sizes | overrides)), batch=batch, length=length, packed=packed)
