"""The entries of a `PartitionSpec` as tuples of mesh axes, and specs with axes left out.

In: `P("data", ("fsdp", "tensor"), None)`. Out: `("data",)`, `("fsdp", "tensor")`, `()`, and back.

    without(P(("data", "tensor")), ("data",))    # P("tensor")
"""

from typing import Any

from jax.sharding import PartitionSpec as P


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def make_entry(axes: tuple[str, ...]) -> Any:
    """One entry of a spec from its mesh axes."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def without(spec: P, dropped: tuple[str, ...]) -> P:
    """The spec without some mesh axes."""
    return P(*(make_entry(tuple(axis for axis in axes_of(entry) if axis not in dropped)) for entry in spec))


def only(spec: P, kept: tuple[str, ...]) -> P:
    """The spec with these mesh axes alone."""
    return P(*(make_entry(tuple(axis for axis in axes_of(entry) if axis in kept)) for entry in spec))


def is_spec(node: Any) -> bool:
    """True for the leaves of a tree of specs."""
    return isinstance(node, P)
