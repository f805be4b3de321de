"""What the linen and the NNX layers of a vocabulary share: padded storage, logits, and the loss of a head.

In: x [batch, length, embed] and a head as it is stored. Out: logits, or a `Loss` in sums that combine exactly.

    loss = cross_entropy(x, table, targets, vocab=50257, vocab_dim=0)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlib import annotate
from shardlib.loss import Loss, Mean
from shardlib.ops.vocab_loss import NUM_CHUNKS, TokenLosses, token_losses
from shardlib.ops.vocab_shards import padded_vocab


def padded_initializer(initializer: Callable[..., Any], vocab: int, *, vocab_dim: int) -> Callable[..., Any]:
    """Draws the logical rows and fills the rest of the stored shape with zeros.

    The numbers drawn depend on the shape asked for: so a model starts from the same weights however it is padded.

    Args:
        initializer: `(key, shape, dtype) -> array`.
        vocab: the logical vocabulary.
        vocab_dim: which dim is the vocabulary.
    """

    def initialize(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        # Of one part of a divided vocabulary, of which Flax asks for the shape alone, all rows are drawn.
        logical = tuple(min(vocab, size) if dim == vocab_dim else size for dim, size in enumerate(shape))
        widths = [(0, stored - drawn) for stored, drawn in zip(shape, logical, strict=True)]
        return jnp.pad(initializer(key, logical, dtype), widths)

    return initialize


def stored_rows(vocab: int, *, multiple: int) -> int:
    """Rows that a parameter has where it stands: padded as a plan's rules say, one part where a plan divides them."""
    shards, parts = (annotate.slot(name, lambda: 1)() for name in (annotate.VOCAB_SHARDS, annotate.VOCAB_PARTS))
    return padded_vocab(vocab, shards=shards, multiple=multiple) // parts


def head_logits(x: jax.Array, head: jax.Array, *, vocab: int, vocab_dim: int, dtype: Any = None) -> jax.Array:
    """The logits themselves, for sampling and evaluation; training wants `cross_entropy`.

    Args:
        x: [batch, length, embed].
        head: [embed, vocab or more] for `vocab_dim=1`, [vocab or more, embed] for `vocab_dim=0`.
        vocab: the logical vocabulary.
        dtype: of the computation; None follows the arguments.

    Returns:
        [batch, length, stored vocab]: padding is kept, so that the dim divides, at the lowest finite number, so that
        neither a softmax nor a maximum sees it.
    """
    dtype = dtype or jnp.promote_types(x.dtype, head.dtype)
    dims = (((x.ndim - 1,), (1 - vocab_dim,)), ((), ()))
    logits = annotate.dot_general(x.astype(dtype), head.astype(dtype), dims)
    if vocab < logits.shape[-1]:
        word = jax.lax.broadcasted_iota(jnp.int32, (1,) * (logits.ndim - 1) + logits.shape[-1:], logits.ndim - 1)
        logits = jnp.where(word < vocab, logits, jnp.finfo(logits.dtype).min)
    return annotate.constrain(logits, "batch", "length", "vocab")


def cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    vocab: int,
    vocab_dim: int,
    weights: jax.Array | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_chunks: int = NUM_CHUNKS,
    dtype: Any = None,
    losses: Callable[..., TokenLosses] = token_losses,
) -> Loss:
    """Cross entropy summed over tokens, without the logits.

    Args:
        x: [batch, length, embed].
        head, vocab, vocab_dim, targets, smoothing, z_loss, num_chunks: as for `token_losses`.
        weights: [batch, length], 0 for a masked token, which counts nowhere whatever its target. None: 1 for every
            token that is not ignored.
        dtype: of the products; None follows the arguments.
        losses: what computes the losses of tokens; `functools.partial(token_losses, mesh=mesh)` splits the vocabulary.

    Returns:
        `Loss` with aux "accuracy", and "nll" where the objective is not the likelihood alone.
    """
    dtype = dtype or jnp.promote_types(x.dtype, head.dtype)
    options = {"smoothing": smoothing, "z_loss": z_loss, "num_chunks": num_chunks}
    x, head = x.astype(dtype), head.astype(dtype)
    found = losses(x, head, targets, vocab=vocab, vocab_dim=vocab_dim, **options)
    weights = found.counted if weights is None else weights.astype(jnp.float32) * found.counted
    total = lambda values: jnp.where(weights == 0, 0.0, values * weights).sum()  # noqa: E731
    weight = weights.sum()
    aux: dict[str, Any] = {"accuracy": Mean(total(found.hits), weight)}
    if smoothing or z_loss:
        aux["nll"] = Mean(total(found.nll), weight)
    return Loss(total=total(found.loss), weight=weight, aux=aux)
