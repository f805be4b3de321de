"""Bytes each device sends for one collective under ring algorithms.

In: kind, size of the full buffer, group size. Out: bytes per device, per execution.

    ring_bytes("all-reduce", buffer_bytes=1024, group_size=4)    # 1536.0
"""

from typing import Final

from meshes.errors import ShardingError, nearest

# Share of the buffer a device sends, in units of (n - 1) / n.
_RING_STEPS: Final = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-reduce": 2,  # a reduce-scatter, then an all-gather
    "all-to-all": 1,
    "ragged-all-to-all": 1,
}
_WHOLE_BUFFER: Final = ("collective-permute", "collective-broadcast")

KINDS: Final = (*_RING_STEPS, *_WHOLE_BUFFER)
"""Every collective kind, spelled as XLA does."""


def ring_bytes(kind: str, *, buffer_bytes: int, group_size: int) -> float:
    """Bytes one device sends in one execution of a collective over a group of n devices.

    All-gather, reduce-scatter and all-to-all send (n-1)/n of the buffer, all-reduce twice that, a permute its
    operand. A broadcast passes the buffer on once; a ragged all-to-all counts its whole operand, an upper bound,
    because the real sizes are data.

    Args:
        kind: one of `KINDS`.
        buffer_bytes: the full buffer: gathered result of an all-gather, operand of everything else.
        group_size: devices that take part together; 1 moves nothing.

    Returns:
        Bytes per device; exact whenever the group size divides the buffer, as XLA arranges.

    Raises:
        ShardingError: unknown kind, negative buffer, or an empty group.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
        sections 4.1 (ring all-gather), 4.3 (all-to-all), 4.5 (all-reduce as reduce-scatter plus all-gather).
    """
    if kind not in KINDS:
        raise ShardingError(f"{kind!r} is not a collective{nearest(kind, KINDS)}", fix=f"use one of {', '.join(KINDS)}")
    if group_size < 1 or buffer_bytes < 0:
        raise ShardingError(
            f"{kind} of {buffer_bytes} bytes over {group_size} devices: sizes cannot be negative or empty"
        )
    if group_size == 1:
        return 0.0
    if kind in _WHOLE_BUFFER:
        return float(buffer_bytes)
    return _RING_STEPS[kind] * buffer_bytes * (group_size - 1) / group_size
