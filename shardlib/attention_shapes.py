"""What attention may be called with: arrays whose shapes and dtypes belong together.

In: queries, keys, values, masks, labels. Out: nothing, or one error that names all that does not fit.

    check_shapes(query, key, value, mask=mask, segment_ids=segment_ids)
"""

from typing import Any

import jax.numpy as jnp

from meshes.errors import raise_collected


def check_shapes(
    query: Any,
    key: Any,
    value: Any,
    *,
    keys: int | None = None,
    mask: Any = None,
    segment_ids: Any = None,
    positions: Any = None,
    own: bool = False,
    where: str = "",
) -> None:
    """Raises for every array that does not fit the queries.

    Args:
        query: [batch, length, heads, head_dim].
        key, value: [batch, keys, kv_heads, head_dim]; heads is a multiple of kv_heads.
        keys: that a mask covers; None for those of `key`.
        mask: [batch or 1, heads or 1, length or 1, keys], boolean.
        segment_ids: [batch, length], integer.
        positions: [batch or 1, length], integer.
        own: keys are of the queries' own sequence, as long as it.
        where: which part of the arrays these are, for the message.

    Raises:
        ShardingError: with a line for each.
    """
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise_collected([f"{_sizes(query, key, value)}: each is [batch, length, heads, head_dim]"], heading=_HEADING)
    batch, length, heads, head_dim = query.shape
    failures = []
    if key.shape[:3] != value.shape[:3] or (key.shape[0], key.shape[3]) != (batch, head_dim):
        failures.append(f"{_sizes(query, key, value)}: batch, head_dim and the keys' length must agree")
    elif own and key.shape[1] != length:
        failures.append(
            f"{_sizes(query, key, value)}: lengths must agree. For attention to another sequence, leave the context "
            "axis out of its rules"
        )
    elif heads % key.shape[2]:
        failures.append(f"{heads} query heads are no multiple of {key.shape[2]} KV heads")
    wanted = (("batch", batch), ("heads", heads), ("length", length))
    keys = key.shape[1] if keys is None else keys
    if mask is not None:
        fits = mask.ndim == 4 and mask.shape[3] == keys
        if not fits or any(size not in (1, whole) for size, (_, whole) in zip(mask.shape, wanted, strict=False)):
            dims = ", ".join(f"{name} {size} or 1" for name, size in wanted)
            over = ": divide its rows over the context axis, not its columns" if where else ""
            failures.append(f"mask {list(mask.shape)}{where} is not [{dims}, keys {keys}]{over}")
        if mask.dtype != jnp.bool_:
            failures.append(f"mask is {mask.dtype}: give a boolean one, True where a query may attend")
    for name, labels, rows in (("segment_ids", segment_ids, (batch,)), ("positions", positions, (batch, 1))):
        if labels is None:
            continue
        if labels.shape not in [(count, length) for count in rows]:
            failures.append(f"{name} {list(labels.shape)}{where} are not [batch {batch}, length {length}]")
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            failures.append(f"{name} are {labels.dtype}: give integers")
    raise_collected(failures, heading=_HEADING)


_HEADING = "attention cannot take its arguments:"


def _sizes(query: Any, key: Any, value: Any) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
