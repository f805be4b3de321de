"""What a train step moves, and how large it is on one device: parameters, activations, messages of a pipeline.

In: resolved arrays, a cut loss. Out: `Arrays`, and elements per device.

    arrays = Arrays(parameters=..., grad_specs=..., activations=..., num_sums=6)
    local_elements(plan, (64, 32), P("fsdp"))    # 64 * 32 / fsdp
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from jax.sharding import PartitionSpec as P

from shardlib.attention_calls import RepeatedCall
from shardlib.pipeline.lowered import Lowered
from shardlib.pipeline.partition import Partition
from shardlib.pipeline.parts import Parts
from shardlib.plan import Plan
from shardlib.spec_axes import axes_of
from shardlib.specs import Entry
from shardlib.spread_vocabulary import SpreadCall
from shardlib.streamed_inputs import Input

SUM_BYTES: Final = 4  # the loss, its weight and metrics are float32
FLOATING: Final = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The pipeline of a step; a static value.

    Args:
        parts: the cut loss at the shapes and dtypes of one slice of a microbatch of one data shard.
        num_slices: slices of a microbatch on a device; a message holds all of them.
        partition: layers per virtual stage.
        lowered: the schedule in ticks.
        spread: positions of the parameters whose vocabulary is spread over the stages.
        spread_calls: their lookups and losses.
        inputs: where the batch's arrays are held, in tree order.
        input_specs: their specs.
    """

    parts: Parts
    num_slices: int
    partition: Partition
    lowered: Lowered
    spread: tuple[int, ...] = ()
    spread_calls: tuple[SpreadCall, ...] = ()
    inputs: tuple[Input, ...] = ()
    input_specs: tuple[P, ...] = ()

    @property
    def chunk_runs(self) -> int:
        """How often each rank runs one of its chunks forwards, and as often backwards."""
        return self.lowered.table.num_microbatches * self.partition.placement.num_chunks

    @property
    def rows_per_rank(self) -> int:
        """Layers that each rank stores, with rows that stand for none."""
        return self.partition.most * self.partition.placement.num_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How sequences that a context axis divides are attended to; a static value.

    Args:
        kind: "ring", "all_to_all" or "gather".
        placement: which device holds which tokens.
        calls: of the attention slot.
    """

    kind: str
    placement: str
    calls: tuple[RepeatedCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """What a step moves; a static value.

    Args:
        parameters: with their specs.
        grad_specs: specs of the reduced gradients, one per parameter.
        activations: the named ones of the loss.
        num_sums: float32 scalars that the loss sums over the batch.
        trainable: per parameter, whether it has a gradient; None for all.
        stages: of a pipeline; None for any other plan.
        attention: over divided sequences; None where they are whole.
    """

    parameters: tuple[Entry, ...]
    grad_specs: tuple[P, ...]
    activations: tuple[Entry, ...]
    num_sums: int
    trainable: tuple[bool, ...] | None = None
    stages: Stages | None = None
    attention: Attention | None = None

    def has_gradient(self, position: int) -> bool:
        """Whether a parameter has one."""
        return self.trainable is None or self.trainable[position]


def splits(spec: P, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """For every dim that some of these axes split, those axes."""
    found = [tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec]
    return [split for split in found if split]


def local_elements(plan: Plan, shape: tuple[int, ...], spec: P) -> int:
    """Elements of an array on one device."""
    return math.prod(shape) // degree(plan, [axis for entry in spec for axis in axes_of(entry)])


def degree(plan: Plan, axes: Sequence[str]) -> int:
    """Into how many parts these axes divide something together."""
    return math.prod(plan.mesh.size(axis) for axis in axes)


def dtype_used(plan: Plan, entry: Entry) -> str:
    """The dtype of a parameter inside the loss."""
    return plan.compute_dtype if entry.dtype in FLOATING else entry.dtype
