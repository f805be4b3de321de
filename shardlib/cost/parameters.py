"""How parameters and their gradients move over the axes that split them or the batch.

In: a parameter, the spec of its reduced gradient, the axes that gather and reduce it. Out: `PromisedCollective`s.

    promises = of_parameter(plan, entry, grad_spec, in_force=InForce.of(plan, axes), axes=axes)

Sources: Rajbhandari et al. 2019 (1910.02054) section 7 (data, ZeRO, fsdp); Zhao et al. 2023 (2304.11277) section 3.2.2
(replicas).
"""

from collections.abc import Iterator

from jax.sharding import PartitionSpec as P

from shardlib.cost.arrays import degree, dtype_used, local_elements, splits
from shardlib.cost.promised_collective import InForce, PromisedCollective, Turns
from shardlib.plan import Plan
from shardlib.spec_axes import axes_of
from shardlib.specs import Entry, itemsize
from shardlib.strategies import DATA_LIKE


def of_parameter(
    plan: Plan,
    entry: Entry,
    *,
    axes: tuple[str, ...],
    in_force: InForce,
    passes: int = 1,
    pieces: int = 1,
    turns: Turns | None = None,
) -> Iterator[PromisedCollective]:
    """Gathered over these axes, dim by dim.

    Args:
        plan, entry: the plan and the parameter.
        axes: data-like, and `stage` for what no stage owns.
        in_force: the promises of these axes.
        passes: how often, each time.
        pieces: of which one is gathered at a time: the chunks of a rank.
        turns: how often in the ticks of a pipeline.
    """
    used = dtype_used(plan, entry)
    size = local_elements(plan, entry.shape, entry.spec) // pieces
    for split in splits(entry.spec, axes):
        size *= degree(plan, split)
        yield from in_force.make(
            "split parameters", split, buffer_bytes=size * itemsize(used), dtype=used, passes=passes, turns=turns
        )


def of_gradient(
    plan: Plan, entry: Entry, grad_spec: P, *, axes: tuple[str, ...], in_force: InForce
) -> Iterator[PromisedCollective]:
    """Scattered over the axes that split the reduced gradient, then summed over the rest, the slow axis last."""
    wire = plan.reduce_dtype if in_force.exact else dtype_used(plan, entry)
    kept = sum((split for split in splits(grad_spec, axes)), ())
    size = local_elements(plan, entry.shape, grad_spec) * degree(plan, kept)
    whole = _whole_tables(plan, entry, grad_spec) if not in_force.exact else 1
    for split in splits(grad_spec, axes):
        scattered = size * itemsize(wire)
        yield from in_force.make("split gradients", split, buffer_bytes=scattered, dtype=wire, form_factor=whole)
        size //= degree(plan, split)
    rest = tuple(axis for axis in axes if axis not in kept)
    yield from of_sum(plan, size, rest, in_force=in_force, wire=wire, form_factor=whole)
    own = sum((split for split in splits(entry.spec, axes)), ())
    more = tuple(axis for axis in kept if axis not in own)
    size = local_elements(plan, entry.shape, entry.spec) * itemsize(entry.dtype)
    yield from in_force.make("updated parameters", more, buffer_bytes=size, dtype=entry.dtype)


def of_sum(
    plan: Plan, size: int, axes: tuple[str, ...], *, in_force: InForce, wire: str, form_factor: int = 1
) -> Iterator[PromisedCollective]:
    """A gradient of `size` elements summed over axes that do not split it, the slow axis last and by itself."""
    apart = tuple(axis for axis in axes if in_force.alone("whole gradients", axis))
    together = tuple(axis for axis in axes if axis not in apart)
    for group in (together, *((axis,) for axis in apart)):
        summed = size * itemsize(wire)
        yield from in_force.make("whole gradients", group, buffer_bytes=summed, dtype=wire, form_factor=form_factor)


def _whole_tables(plan: Plan, entry: Entry, grad_spec: P) -> int:
    """How much larger the compiler's gradient of a vocabulary table is than its part: it adds up whole tables."""
    split = axes_of(grad_spec[0]) if entry.names[:1] == ("vocab",) else ()
    return degree(plan, [axis for axis in split if axis not in DATA_LIKE])
