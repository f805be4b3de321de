"""Cross entropy over a vocabulary that is split over devices, without the logits: neither moved nor ever whole.

In: x [batch, length, embed], a head [embed, vocab] (or the tied table [vocab, embed]) and integer targets. Out: losses
and hits per token, from which a model makes its `Loss`. The length is taken in chunks; the backward pass makes each
chunk's logits again.

    found = token_losses(x, head, targets, axes=("tensor",), mesh=mesh, smoothing=0.1, z_loss=1e-4)
    loss = Loss(total=(found.loss * weights).sum(), weight=(found.counted * weights).sum())
"""

import functools
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from meshes.errors import raise_collected
from shardlib.ops.chunks import over_chunks
from shardlib.ops.vocab_shards import BATCH_AXES, LENGTH_AXES, VOCAB_AXES, Shards, check_sizes, find_shards, varying

NUM_CHUNKS: Final = 8
"""Into how many chunks the length is cut unless a caller says otherwise; one chunk's logits live at a time."""
_LOWEST: Final = float(jnp.finfo(jnp.float32).min)  # finite: the difference of two infinities is no number


class TokenLosses(NamedTuple):
    """Per token, all [batch, length] float32; a pytree of arrays.

    Args:
        loss: the objective: cross entropy with label smoothing, plus the z-loss.
        nll: the negative log-likelihood of the target alone, in nats.
        hits: 1 where no logit is larger than the target's, else 0.
        counted: 0 where the token is ignored, else 1.
    """

    loss: jax.Array
    nll: jax.Array
    hits: jax.Array
    counted: jax.Array


def token_losses(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    vocab: int | None = None,
    vocab_dim: int = 1,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_chunks: int = NUM_CHUNKS,
    axes: str | tuple[str, ...] = VOCAB_AXES,
    batch_axes: tuple[str, ...] = BATCH_AXES,
    length_axes: tuple[str, ...] = LENGTH_AXES,
    mesh: Mesh | AbstractMesh | None = None,
    logits_dtype: Any = jnp.float32,
    reduce_dtype: Any = jnp.float32,
) -> TokenLosses:
    """Cross entropy of the logits `x @ head` against integer targets, in float32.

    With l the logits of the V logical words, Z = sum exp(l) and y the target:

        nll  = log Z - l[y]
        loss = log Z - (1 - smoothing) l[y] - smoothing mean(l) + z_loss (log Z)^2

    Works on whole arrays under automatic axes, in regions manual over other axes, and on the slices of a region that
    is manual over `axes` (`find_shards` says how each axis is taken). Inside a region made with `check_vma=False`,
    differentiate inside it too: JAX divides what crosses its boundary by the size of the axes. There the gradient of x
    is whole on every shard; the gradient of the head is the shard's own.

    Args:
        x: [batch, length, embed], floating.
        head: [embed, vocab or more] for `vocab_dim=1`, [vocab or more, embed] for `vocab_dim=0`.
        targets: [batch, length], integer. Negative: the token is ignored, with zero loss, hits, count and gradient.
            From `vocab` on: a mistake in the data, whose loss is NaN so that it is seen.
        vocab: the logical vocabulary; words from there on are padding, which counts nowhere and whose gradients are
            zero. None for every stored word.
        vocab_dim: which dim of the head is the vocabulary.
        smoothing: share of the target's probability spread evenly over the logical vocabulary, in [0, 1).
        z_loss: factor of (log Z)^2, 1e-4 in the source.
        num_chunks: into how many chunks the length is cut; more than the length is one token at a time.
        axes: mesh axes that split the vocabulary, major first.
        batch_axes, length_axes: mesh axes that split the tokens.
        mesh: for a caller outside any manual region; None for the mesh in force, or one device when there is none.
        logits_dtype: what the logits are rounded to before the statistics, which are float32 either way.
        reduce_dtype: of the sum of x's gradient over devices. In a partly manual region XLA's CPU backend aborts on
            bfloat16 sums (JAX 0.10.2, 0.12.0), hence the default.

    Raises:
        ShardingError: ranks, dtypes, options, axes or sizes that do not fit.

    Communication over t shards: all-reduces of one maximum and two sums per token (three with smoothing), float32,
    after the last chunk; backward one all-reduce of batch x length x embed. Over the axes of tokens: one reduction of
    the head's gradient.

    Source: Shoeybi et al. 2019 (1909.08053) section 3; smoothing: Szegedy et al. 2015 (1512.00567) section 7; z-loss:
        Chowdhery et al. 2022 (2204.02311) section 5.
    """
    _check(x, head, targets, vocab_dim=vocab_dim, smoothing=smoothing, num_chunks=num_chunks)
    shards = find_shards(axes, batch_axes=batch_axes, length_axes=length_axes, mesh=mesh)
    vocab = head.shape[vocab_dim] * shards.num_outside if vocab is None else vocab
    check_sizes(shards, parameter="head", stored=head.shape[vocab_dim], vocab=vocab, tokens=targets.shape)
    dtype = jnp.promote_types(x.dtype, head.dtype)
    head, x, targets = shards.aligned(head.astype(dtype), x.astype(dtype), targets.astype(jnp.int32))
    head_loss = _HeadLoss(
        shards=shards,
        vocab=vocab,
        is_padded=vocab < head.shape[vocab_dim] * shards.num_outside,
        vocab_dim=vocab_dim,
        num_chunks=num_chunks,
        with_mean=smoothing > 0,
        logits_dtype=jnp.dtype(logits_dtype),
        reduce_dtype=jnp.dtype(reduce_dtype),
    )
    found: Any = _statistics(head_loss, x, head, targets)
    return _per_token(found[0], found[1], targets, vocab=vocab, smoothing=smoothing, z_loss=z_loss)


def _per_token(
    largest: jax.Array, sums: jax.Array, targets: jax.Array, *, vocab: int, smoothing: float, z_loss: float
) -> TokenLosses:
    """The losses from what `_statistics` returns; what autodiff needs from here on is per token."""
    log_sum, target = jnp.log(sums[0]), sums[1] - largest
    nll = log_sum - target
    loss = nll
    if smoothing:
        loss = loss + smoothing * (target - (sums[2] / vocab - largest))
    if z_loss:
        loss = loss + z_loss * jnp.square(largest + log_sum)
    is_counted, is_known = targets >= 0, targets < vocab
    shown = lambda value: jnp.where(is_counted, jnp.where(is_known, value, jnp.nan), 0.0)  # noqa: E731
    hits = is_counted & is_known & (target == 0)
    return TokenLosses(shown(loss), shown(nll), hits.astype(jnp.float32), is_counted.astype(jnp.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadLoss:
    """What the loss knows before it sees arrays; one static leaf."""

    shards: Shards
    vocab: int
    is_padded: bool
    vocab_dim: int
    num_chunks: int
    with_mean: bool
    logits_dtype: Any
    reduce_dtype: Any

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        """[batch, chunk, vocab_local] float32, padding at the lowest finite number."""
        dims = (((2,), (1 - self.vocab_dim,)), ((), ()))
        logits = jax.lax.dot_general(x, head, dims, preferred_element_type=jnp.float32)
        if self.logits_dtype != jnp.float32:
            # Not a cast there and back, which a compiler may leave out in one place and not in another.
            info = jnp.finfo(self.logits_dtype)
            logits = jax.lax.reduce_precision(logits, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        return jnp.where(self.is_word(logits.shape[-1]), logits, _LOWEST) if self.is_padded else logits

    def is_word(self, num_local: int) -> jax.Array:
        """[1, 1, vocab_local]: which of this shard's words are of the logical vocabulary."""
        return _word(num_local) + self.shards.index() * num_local < self.vocab

    def is_target(self, targets: jax.Array, num_local: int) -> jax.Array:
        """[batch, chunk, vocab_local]: by comparison, for a gather would need the target's owner to answer."""
        return _word(num_local) == (targets - self.shards.index() * num_local)[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(head_loss: _HeadLoss, x: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit [batch, length], a constant to derivatives, and sums [2 or 3, batch, length] over the words.

    The sums are of exp(logit - largest), of the target's logit, and for smoothing of all logits.
    """
    shards = head_loss.shards
    body = functools.partial(_local_statistics, head_loss)
    in_specs = (shards.token_spec(3), shards.vocab_spec(2, head_loss.vocab_dim), shards.token_spec(2))
    out_specs = (shards.token_spec(2), shards.token_spec(3, first=1))
    return shards.run(body, in_specs, out_specs)(x, head, targets)


def _local_statistics(
    head_loss: _HeadLoss, x: jax.Array, head: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Per shard: every chunk's own statistics first, then one maximum and one sum over devices for all of them."""

    def chunk(_: Any, x: jax.Array, targets: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        logits = head_loss.logits(x, head)
        largest = logits.max(axis=-1)
        is_target = head_loss.is_target(targets, logits.shape[-1])
        sums = [jnp.exp(logits - largest[..., None]).sum(axis=-1), jnp.where(is_target, logits, 0.0).sum(axis=-1)]
        if head_loss.with_mean:
            sums.append(_of_words(head_loss, logits).sum(axis=-1))
        return None, (largest, jnp.stack(sums, axis=2))

    _, (own, sums) = over_chunks(chunk, None, (x, targets), num_chunks=head_loss.num_chunks)
    largest = head_loss.shards.largest(own)
    sums = jnp.moveaxis(sums, 2, 0)
    # Each shard's sum of exponentials counts from its own maximum.
    sums = jnp.concatenate([sums[:1] * jnp.exp(own - largest)[None], sums[1:]])
    return largest, head_loss.shards.total(sums)


def _forward(head_loss: _HeadLoss, x: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[Any, Any]:
    found: Any = _statistics(head_loss, x, head, targets)
    return found, (x, head, targets, found[0])


def _backward(head_loss: _HeadLoss, kept: Any, cotangents: Any) -> tuple[jax.Array, jax.Array, None]:
    # The largest logit is subtracted in one place and added in another: its derivative is zero in the whole.
    shards, dim = head_loss.shards, head_loss.vocab_dim
    x, head, targets, largest = kept
    tokens = shards.token_spec(2)
    in_specs = (shards.token_spec(3), shards.vocab_spec(2, dim), tokens, tokens, shards.token_spec(3, first=1))
    out_specs = (shards.token_spec(3), shards.gradient_spec(2, dim))
    body = functools.partial(_local_gradients, head_loss)
    dx, dhead = shards.run(body, in_specs, out_specs)(x, head, targets, largest, cotangents[1])
    return dx, dhead.sum(axis=0).astype(head.dtype), None


_statistics.defvjp(_forward, _backward)


def _local_gradients(
    head_loss: _HeadLoss, x: jax.Array, head: jax.Array, targets: jax.Array, largest: jax.Array, by: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Per shard: the chunk's logits again, their cotangent, two products; then one sum of x's gradient over devices.

    Args:
        by: cotangents of the sums, [2 or 3, batch, length].
    """
    dim = head_loss.vocab_dim
    multiply = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    def chunk(
        dhead: jax.Array, x: jax.Array, targets: jax.Array, largest: jax.Array, by: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits = head_loss.logits(x, head)
        is_target = head_loss.is_target(targets, logits.shape[-1])
        dlogits = jnp.exp(logits - largest[..., None]) * by[..., 0, None] + jnp.where(is_target, by[..., 1, None], 0.0)
        if head_loss.with_mean:
            dlogits = dlogits + _of_words(head_loss, jnp.broadcast_to(by[..., 2, None], logits.shape))
        dlogits = dlogits.astype(x.dtype)
        dx = multiply(dlogits, head, (((2,), (dim,)), ((), ())))
        pair = (dlogits, x) if dim == 0 else (x, dlogits)
        return dhead + multiply(*pair, (((0, 1), (0, 1)), ((), ()))), dx.astype(head_loss.reduce_dtype)

    arrays = (x, targets, largest, jnp.moveaxis(by, 0, 2))
    zeros = jnp.zeros_like(head, jnp.float32)
    dhead, dx = over_chunks(chunk, zeros, arrays, num_chunks=head_loss.num_chunks)
    # One value on all shards, except where a checked region says that each shard has an x of its own.
    axes = tuple(axis for axis in head_loss.shards.vocab if axis not in varying(x))
    dx = jax.lax.psum(dx, axes) if axes else dx
    return dx.astype(x.dtype), dhead[None]


def _of_words(head_loss: _HeadLoss, values: jax.Array) -> jax.Array:
    """Values per word of this shard, zero for padding."""
    return jnp.where(head_loss.is_word(values.shape[-1]), values, 0.0) if head_loss.is_padded else values


def _word(num_local: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (1, 1, num_local), 2)


def _check(
    x: jax.Array, head: jax.Array, targets: jax.Array, *, vocab_dim: int, smoothing: float, num_chunks: int
) -> None:
    failures = []
    if x.ndim != 3 or targets.shape != x.shape[:2] or not jnp.issubdtype(targets.dtype, jnp.integer):
        failures.append(
            f"x {x.dtype}{list(x.shape)} and targets {targets.dtype}{list(targets.shape)} are not [batch, length, "
            "embed] and integer [batch, length]"
        )
    if vocab_dim not in (0, 1):
        failures.append(f"vocab_dim={vocab_dim} is not 0 ([vocab, embed]) or 1 ([embed, vocab])")
    elif head.ndim != 2 or head.shape[1 - vocab_dim] != x.shape[-1]:
        wanted = "[embed, vocab]" if vocab_dim else "[vocab, embed]"
        failures.append(
            f"head {list(head.shape)} is not {wanted} for embed={x.shape[-1]}; fix: pass vocab_dim={1 - vocab_dim} for "
            "a head stored the other way round"
        )
    if not 0 <= smoothing < 1:
        failures.append(f"smoothing={smoothing} is not in [0, 1)")
    if num_chunks < 1:
        failures.append(f"num_chunks={num_chunks} is not 1 or more")
    raise_collected(failures, heading="token_losses cannot take these arguments:")
