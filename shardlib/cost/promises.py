"""Strategies' promises + a model's arrays + a plan -> bytes each device sends in one step, collective by collective.

In: the plan, resolved parameters and activations, specs of the reduced gradients. Out: `PromisedCollective`s.

    promises = promised(plan, arrays)
"""

from collections.abc import Iterator
from typing import Any

from shardlib.cost.arrays import SUM_BYTES, Arrays, Attention, Stages
from shardlib.cost.attention import of_attention
from shardlib.cost.parameters import of_gradient, of_parameter
from shardlib.cost.pipelines import of_pipeline
from shardlib.cost.products import of_products
from shardlib.cost.promised_collective import InForce, PromisedCollective
from shardlib.plan import Plan
from shardlib.strategies import DATA_LIKE

__all__ = ["Arrays", "Attention", "PromisedCollective", "Stages", "promised"]


def promised(plan: Plan, arrays: Arrays) -> tuple[PromisedCollective, ...]:
    """Everything the strategies of the plan's axes promise about one train step, equal ones added up.

    Exact for the data-like axes under the explicit lowering, and for stages. Under the automatic one, and for other
    axes, bytes are those of the method's own table, and `form_bytes` what the compiler is known to make of it.

    Args:
        plan: its mesh without -1.
        arrays: what the model has.

    Example:
        A parameter of 1 MiB on fsdp=8, explicit: an all-gather and a reduce-scatter of 7/8 MiB, and the sums.
    """
    found: dict[Any, PromisedCollective] = {}
    outer = of_pipeline if arrays.stages else _of_data_like
    for one in (*outer(plan, arrays), *of_products(plan, arrays), *of_attention(plan, arrays)):
        if one.form_bytes == 0:
            continue
        key = (one.kind, one.axes, one.what, one.loop, one.form_kind)
        found[key] = one if key not in found else found[key].plus(one)
    return tuple(found.values())


def _of_data_like(plan: Plan, arrays: Arrays) -> Iterator[PromisedCollective]:
    axes = tuple(axis for axis in plan.mesh.names if axis in DATA_LIKE and plan.mesh.size(axis) > 1)
    in_force = InForce.of(plan, axes)
    if "sums" in in_force.promises:
        # Accumulation needs the weight before the first backward pass: it is summed once by itself.
        passes = 2 if in_force.exact and plan.num_microbatches > 1 else 1
        size = arrays.num_sums * SUM_BYTES
        yield from in_force.make("sums", axes, buffer_bytes=size, dtype="float32", passes=passes)
    for position, (entry, grad_spec) in enumerate(zip(arrays.parameters, arrays.grad_specs, strict=True)):
        yield from of_parameter(plan, entry, axes=axes, in_force=in_force)
        if arrays.has_gradient(position):
            yield from of_gradient(plan, entry, grad_spec, axes=axes, in_force=in_force)
