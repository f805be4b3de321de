"""Which kind of context-parallel attention, from the bytes each one sends: the owner of those formulas.

In: sizes of one attention layer. Out: a kind, a placement and the reason in words.

    choose(length=8192, heads=32, kv_heads=8, head_dim=128, batch=1, context=8, causal=True).kind    # "all_to_all"
"""

from dataclasses import dataclass
from typing import Final

from meshes.errors import raise_collected
from shardlib.ops.all_to_all_attention import copies_of_kv_heads
from shardlib.ops.context_layout import needed_shifts

GRADIENT_BYTES: Final = 4
"""Gradients of keys and values are float32 while they travel."""

# v5p: 459 bfloat16 TFLOP/s against 90 GB/s one way over one link (Cloud TPU documentation; scaling-book, tpus.md).
FLOPS_PER_BYTE: Final = 5100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One kind, for one layer and one device; a static leaf.

    Args:
        kind: one of `context_attention.KINDS` with a single axis.
        placement: one of `context_layout.PLACEMENTS`.
        forward_bytes, backward_bytes: sent per device, of keys, values, heads and their gradients; labels are extra.
        hidden_bytes: how much of that the computation hides: what travels beside it, up to its time on the link.
        memory_bytes: keys and values that a device holds for the layer beside its own shard.
        refused: why it cannot be used, None when it can.
    """

    kind: str
    placement: str
    forward_bytes: float
    backward_bytes: float
    hidden_bytes: float
    memory_bytes: float
    refused: str | None

    @property
    def exposed_bytes(self) -> float:
        """Bytes that nothing hides, both ways."""
        return self.forward_bytes + self.backward_bytes - self.hidden_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kind with the fewest exposed bytes of those that fit; a static leaf.

    Args:
        kind, placement: of the candidate taken.
        reason: one line per candidate, the chosen one first.
        candidates: all of them, the chosen one first.
    """

    kind: str
    placement: str
    reason: str
    candidates: tuple[Candidate, ...]


def choose(
    *,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    tensor: int = 1,
    causal: bool,
    window: int | None = None,
    dtype_bytes: int = 2,
    flops_per_byte: float = FLOPS_PER_BYTE,
    in_branch: bool = False,
) -> Choice:
    """Compares ring, all-to-all and all-gather attention for one layer.

    A ring's transfers run beside its computation, the others' do not. All-gather always sends less than an exposed
    ring, at the memory of all keys and values: it is refused where they take more than the device's own queries and
    results, unless nothing else fits.

    Args:
        length: of the whole sequence.
        heads, kv_heads, head_dim: of the whole layer.
        batch: sequences on a device.
        context, tensor: sizes of the axes that divide the sequence and the heads.
        causal, window: the mask.
        dtype_bytes: of an element of keys and values.
        flops_per_byte: of the chip: FLOP/s of the products over bytes/s to a neighbour.
        in_branch: it runs under a condition that differs between devices of other axes, as in a pipeline that skips
            idle work. A permute waits there for devices that never come (seen: XLA's CPU backend aborts).

    Raises:
        ShardingError: no kind fits; each with what is wrong and the fix.

    Source: ring and gather send blocks of keys and values, Liu et al. 2023 (2310.01889) section 3; all-to-all
        exchanges heads, Jacobs et al. 2023 (2309.14509) section 3.2; bytes of collectives as in `cost.collectives`.
    """
    sizes = {"length": length, "batch": batch, "head_dim": head_dim, "context": context, "dtype_bytes": dtype_bytes}
    problem = None
    if heads % kv_heads or heads % tensor:
        problem = f"{heads} query heads must be a multiple of {kv_heads} KV heads and divide over tensor={tensor}"
    elif length % context:
        problem = f"length {length} is not divisible by context={context}: pad to {-(-length // context) * context}"
    raise_collected([problem] if problem else [], heading="no context-parallel attention fits:")
    local, local_kv = heads // tensor, kv_heads * copies_of_kv_heads(kv_heads, shards=tensor) // tensor
    placement = "contiguous"
    if causal and window is None:
        placement = "zigzag" if length % (2 * context) == 0 else "striped"
    shifts = needed_shifts(length=length, shards=context, placement=placement, causal=causal, window=window)
    scores = batch * length / context * min(window or length, length) * (0.5 if causal and window is None else 1.0)
    # Two products forward and five backward, two operations for each score and element of a head.
    hideable = 14 * scores * local * head_dim / flops_per_byte
    candidates = [
        _ring(
            placement=placement,
            hops=len(shifts) - 1,
            hideable=hideable,
            in_branch=in_branch,
            kv_heads=local_kv,
            **sizes,
        ),
        _all_to_all(heads=local, kv_heads=local_kv, **sizes),
    ]
    alone = all(candidate.refused for candidate in candidates)
    candidates.append(_gather(placement=placement, heads=local, alone=alone, kv_heads=local_kv, **sizes))
    candidates.sort(key=lambda candidate: (candidate.refused is not None, candidate.exposed_bytes))
    best = candidates[0]
    return Choice(
        kind=best.kind,
        placement=best.placement,
        reason="\n".join(_line(candidate) for candidate in candidates),
        candidates=tuple(candidates),
    )


def kv_bytes(*, length: int, batch: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of the keys, or of the values, of whole sequences on one device."""
    return batch * length * kv_heads * head_dim * dtype_bytes


def ring_sent(*, hops: int, context: int, length: int, batch: int, kv_heads: int, head_dim: int, dtype_bytes: int):
    """Bytes sent per device forward and backward by a ring over `hops` of its `context` - 1 distances.

    Forward keys and values; backward both again and their gradients in float32.
    """
    size = kv_bytes(length=length, batch=batch, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    forward = 2 * hops * size / context
    return forward, forward * (1 + GRADIENT_BYTES / dtype_bytes)


def all_to_all_sent(
    *, context: int, length: int, batch: int, heads: int, kv_heads: int, head_dim: int, dtype_bytes: int
) -> float:
    """Bytes sent per device each way: queries, keys, values and result, or their gradients.

    Args:
        heads, kv_heads: on one device before the exchange; KV heads are repeated where they do not divide.
    """
    rows = 2 * heads + 2 * kv_heads * copies_of_kv_heads(kv_heads, shards=context)
    share = kv_bytes(length=length, batch=batch, kv_heads=rows, head_dim=head_dim, dtype_bytes=dtype_bytes) / context
    return (context - 1) / context * share


def gather_sent(*, context: int, length: int, batch: int, kv_heads: int, head_dim: int, dtype_bytes: int):
    """Bytes sent per device forward (keys and values) and backward (their gradients, added in float32)."""
    size = kv_bytes(length=length, batch=batch, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    forward = 2 * (context - 1) / context * size
    return forward, forward * GRADIENT_BYTES / dtype_bytes


def _ring(*, placement: str, hops: int, hideable: float, in_branch: bool, context: int, **sizes: int) -> Candidate:
    forward, backward = ring_sent(hops=hops, context=context, **sizes)
    return Candidate(
        kind="ring",
        placement=placement,
        forward_bytes=forward,
        backward_bytes=backward,
        hidden_bytes=min(hideable, forward + backward),
        memory_bytes=2 * kv_bytes(**sizes) / context,
        refused="a permute under a condition that differs between devices deadlocks" if in_branch else None,
    )


def _all_to_all(*, heads: int, kv_heads: int, context: int, **sizes: int) -> Candidate:
    sent = all_to_all_sent(heads=heads, kv_heads=kv_heads, context=context, **sizes)
    copies = copies_of_kv_heads(kv_heads, shards=context)
    return Candidate(
        kind="all_to_all",
        placement="contiguous",
        forward_bytes=sent,
        backward_bytes=sent,
        hidden_bytes=0.0,
        memory_bytes=2 * copies * kv_bytes(kv_heads=kv_heads, **sizes) / context,
        refused=f"{heads} query heads on a device do not divide over {context} shards" if heads % context else None,
    )


def _gather(*, placement: str, heads: int, alone: bool, kv_heads: int, context: int, **sizes: int) -> Candidate:
    forward, backward = gather_sent(kv_heads=kv_heads, context=context, **sizes)
    refused = None
    if kv_heads * context > heads and not alone:
        refused = f"all keys and values are {kv_heads * context / heads:.3g} times a device's queries and results"
    return Candidate(
        kind="gather",
        placement=placement,
        forward_bytes=forward,
        backward_bytes=backward,
        hidden_bytes=0.0,
        memory_bytes=2 * kv_bytes(kv_heads=kv_heads, **sizes),
        refused=refused,
    )


def _line(candidate: Candidate) -> str:
    sent, hidden, memory = (
        f"{amount / 2**20:.3g} MiB"
        for amount in (
            candidate.forward_bytes + candidate.backward_bytes,
            candidate.hidden_bytes,
            candidate.memory_bytes,
        )
    )
    text = f"{candidate.kind} ({candidate.placement}): sends {sent} per layer and device"
    text += f", {hidden} of it behind computation" if candidate.hidden_bytes else ""
    return f"{text}, holds {memory}" + (f"; refused: {candidate.refused}" if candidate.refused else "")
