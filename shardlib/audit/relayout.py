"""Layouts to pass through where the compiler would gather a whole array to change its layout.

In: the spec an array has and the one it should get. Out: specs that each move one mesh axis, an all-to-all apiece.

    middle_layouts(P("y", None, "x"), P(None, ("x", "y"), None))    # (P("y", "x", None),)
"""

from jax.sharding import PartitionSpec as P

from shardlib.spec_axes import axes_of, make_entry


def middle_layouts(source: P, target: P) -> tuple[P, ...] | None:
    """The specs between two layouts of the same mesh axes, for one `with_sharding_constraint` each.

    An axis moves only as the innermost of the dim it leaves and of the dim it joins: then every device exchanges
    blocks with those along that axis, and nothing is gathered.

    Args:
        source, target: specs of the same array, as long as it has dims.

    Returns:
        The layouts in between, none when one move is enough; None when no such order exists.
    """
    now, wanted = [list(axes_of(entry)) for entry in source], [list(axes_of(entry)) for entry in target]
    axes_in = lambda entries: sorted(axis for axes in entries for axis in axes)  # noqa: E731
    if axes_in(now) != axes_in(wanted):
        return None
    layouts: list[P] = []
    while now != wanted:
        move = next(
            (
                (leaves, joins)
                for leaves, axes in enumerate(now)
                for joins, goal in enumerate(wanted)
                if axes
                and axes != wanted[leaves][: len(axes)]
                and goal[: len(now[joins]) + 1] == [*now[joins], axes[-1]]
            ),
            None,
        )
        if move is None:
            return None
        leaves, joins = move
        now[joins].append(now[leaves].pop())
        layouts.append(P(*(make_entry(tuple(axes)) for axes in now)))
    return tuple(layouts[:-1])
