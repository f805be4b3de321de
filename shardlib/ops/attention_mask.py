"""What a query may attend to, from labels that travel with tokens instead of [length, length] arrays.

In: positions and segment ids of some rows and some columns. Out: their boolean mask, or whether it is empty.

    view = View(rows=Labels(positions, None), columns=Labels(positions, None), mask=None)
    allowed(Rule(causal=True, window=None), view)    # [1, rows, columns]
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshes.errors import ShardingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The mask that positions imply; a static leaf.

    Args:
        causal: a query attends to keys at its own and earlier positions.
        window: a query attends to keys less than this many positions away: the last `window` tokens, itself
            included, when causal. None for no limit.
    """

    causal: bool
    window: int | None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ShardingError(f"a window of {self.window} tokens", fix="give at least 1: the token itself")

    def check_window(self, length: int) -> None:
        """Raises when the window is larger than the sequence."""
        if self.window is not None and self.window > length:
            raise ShardingError(
                f"window {self.window} is larger than the length {length}: it limits nothing",
                fix="leave window out, or check which of the two is meant",
            )


class Labels(NamedTuple):
    """What is known of some tokens; a pytree.

    Args:
        positions: [batch or 1, tokens], int32: where each token stands in the sequence.
        segment_ids: [batch, tokens], int32: the document of each token; None when rows hold one document.
    """

    positions: jax.Array
    segment_ids: jax.Array | None


class View(NamedTuple):
    """Some queries against some keys; a pytree.

    Args:
        rows: labels of the queries.
        columns: labels of the keys.
        mask: [batch or 1, heads or 1, rows or 1, columns], boolean, True where a query may attend; or None.
    """

    rows: Labels
    columns: Labels
    mask: jax.Array | None


def cut(x: jax.Array | None, start: jax.Array | int, size: int, *, axis: int) -> jax.Array | None:
    """`size` entries of a dim from `start`; None, and a dim of size 1 that stands for all, stay as they are."""
    if x is None or x.shape[axis] in (1, size):
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def tile_of(view: View, *, row: jax.Array | int, column: jax.Array | int, rows: int, columns: int) -> View:
    """`rows` queries from `row` against `columns` keys from `column`."""
    mask = cut(cut(view.mask, row, rows, axis=2), column, columns, axis=3)
    return View(
        rows=jax.tree.map(lambda x: cut(x, row, rows, axis=1), view.rows),
        columns=jax.tree.map(lambda x: cut(x, column, columns, axis=1), view.columns),
        mask=mask,
    )


def allowed(rule: Rule, view: View) -> jax.Array | None:
    """Where a query may attend by positions and segments: [batch or 1, rows, columns]; None for everywhere."""
    distance = view.rows.positions[:, :, None] - view.columns.positions[:, None, :]
    parts = []
    if rule.causal:
        parts.append(distance >= 0)
    if rule.window is not None:
        parts.append((distance if rule.causal else jnp.abs(distance)) < rule.window)
    if view.rows.segment_ids is not None and view.columns.segment_ids is not None:
        parts.append(view.rows.segment_ids[:, :, None] == view.columns.segment_ids[:, None, :])
    if not parts:
        return None
    found = parts[0]
    for part in parts[1:]:
        found = found & part
    return found


def any_allowed(rule: Rule, view: View) -> jax.Array | None:
    """Whether `allowed` may be True somewhere, from smallest and largest labels alone; None when it always is.

    Never False for a view with an allowed entry; it may be True for one without.
    """
    first, last = (bound(view.rows.positions) for bound in (jnp.min, jnp.max))
    first_key, last_key = (bound(view.columns.positions) for bound in (jnp.min, jnp.max))
    parts = []
    if rule.causal:
        parts.append(first_key <= last)
    if rule.window is not None:
        parts.append(first - last_key < rule.window)
        if not rule.causal:
            parts.append(first_key - last < rule.window)
    if view.rows.segment_ids is not None and view.columns.segment_ids is not None:
        rows, columns = view.rows.segment_ids, view.columns.segment_ids
        overlap = (rows.min(axis=1) <= columns.max(axis=1)) & (columns.min(axis=1) <= rows.max(axis=1))
        parts.append(overlap.any())
    return jnp.stack(parts).all() if parts else None
