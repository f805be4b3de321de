"""What a person asks about a pipeline before it runs: what was cut where, who holds what, who waits how long.

In: `Staging` and its plan. Out: `StagingFacts`, plain numbers and words, part of an explanation.

    facts = staging_facts(bound.staging, plan, bound.abstract_params)
    facts.bubble_fraction
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardlib.pipeline.lowered import Lowered
from shardlib.pipeline.partition import Partition
from shardlib.pipeline.parts import Parts
from shardlib.pipeline.placement import stages_by_rank
from shardlib.pipeline.simulate import simulate
from shardlib.pipeline.stack import Stacked
from shardlib.plan import STAGE, Plan
from shardlib.remat import Policy
from shardlib.staging import Staging, costs_of, own_shares, recomputes, shares
from shardlib.streamed_inputs import Input

SEVERAL: Final = " ... "
"""Between the first and the last path of a kind of parameter that every layer has as an array of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One rank of the axis `stage`; a static leaf.

    Args:
        layers: the layers of each of its chunks, as (first, one past the last).
        load: forward matrix products per microbatch, in layers; the first and the last virtual stage's include what
            comes before and after the layers.
        layer_parameters: scalar parameters of its layers, without padding.
        live_microbatches: the most activations it holds at once, in microbatches of one chunk.
    """

    layers: tuple[tuple[int, int], ...]
    load: float
    layer_parameters: int
    live_microbatches: int

    @property
    def num_layers(self) -> int:
        """How many layers it runs."""
        return sum(stop - start for start, stop in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly a partition spreads the work; a static leaf.

    Args:
        layers: per rank.
        loads: per rank, in layers.
    """

    layers: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def max_over_mean(self) -> float:
        """The dearest rank's load over the average: 1 where all work alike."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingFacts:
    """A pipeline in numbers; a static leaf. Sizes are those of one microbatch of one data shard.

    Args:
        where: the scan or the markers that were cut, with the model's line.
        layer_parameters: paths of the parameters of the layers, one per kind.
        other_parameters: scalar parameters outside of the layers.
        spread_parameters: those of them whose vocabulary stays in parts over the stages, which compute embedding and
            head together.
        message: what travels from stage to stage, as text per array: the carry, then what layers put out.
        message_bytes, cotangent_bytes: bytes of a message forwards, and of its gradient backwards.
        shared_inputs: values that every layer reads beside the carry, as text.
        sliced_inputs: values with a slice per layer, as text.
        side_flops: FLOPs of matrix products that each stage repeats to make them.
        layer_flops: FLOPs of one layer's matrix products, forward.
        embedding, head: what comes before and after the layers, in layers.
        balance: as the plan wants it: "even" or "cost".
        chosen, by_cost: the partition there is, and the one that balance="cost" makes.
        stages: one entry per rank.
        num_chunks, num_microbatches, num_ticks: of the schedule.
        schedule: its name.
        residuals: what waits for the backward pass: "stage" (a stage's input), or a policy's text.
        ring_slots, ring_bytes: slots of the ring that every rank has for it, and their bytes; None for policies whose
            bytes only the compiled program tells.
        bubble_fraction: idle share of a step in lockstep, under costs by matrix products.
        free_bubble_fraction: the same if every rank went on as soon as it could.
        message_bytes_per_device: sent by the busiest device in one step.
        num_permutes: collective permutes of messages in one step.
        inputs: where the batch's arrays are held, in tree order.
        padded_rows, num_rows: stored rows that stand for no layer, and all of them.
        padded_parameters: scalars in such rows.
    """

    where: str
    layer_parameters: tuple[str, ...]
    other_parameters: int
    spread_parameters: int
    message: tuple[str, ...]
    message_bytes: int
    cotangent_bytes: int
    shared_inputs: tuple[str, ...]
    sliced_inputs: tuple[str, ...]
    side_flops: int
    layer_flops: int
    embedding: float
    head: float
    balance: str
    chosen: Balance
    by_cost: Balance
    stages: tuple[StageFacts, ...]
    num_chunks: int
    num_microbatches: int
    num_ticks: int
    schedule: str
    residuals: str
    ring_slots: int
    ring_bytes: int | None
    bubble_fraction: float
    free_bubble_fraction: float
    message_bytes_per_device: int
    num_permutes: int
    inputs: tuple[Input, ...]
    padded_rows: int
    num_rows: int
    padded_parameters: int

    @property
    def num_layers(self) -> int:
        """L."""
        return sum(stage.num_layers for stage in self.stages)

    @property
    def notices(self) -> tuple[str, ...]:
        """What is legal and still worth saying."""
        found = []
        stages = len(self.stages)
        if self.num_microbatches < stages:
            found.append(
                f"{self.num_microbatches} microbatches on {stages} stages: the stages wait for "
                f"{self.bubble_fraction:.0%} of a step; more microbatches (num_microbatches) shorten that"
            )
        if self.side_flops:
            found.append(
                f"every stage repeats matrix products of {self.side_flops:,} FLOPs per microbatch to make side inputs; "
                "pass their result through the layers' carry instead"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON values."""
        document = asdict(self)
        for name in ("chosen", "by_cost"):
            balance = getattr(self, name)
            document[name] = {**asdict(balance), "max_over_mean": balance.max_over_mean}
        return {**document, "num_layers": self.num_layers}


def staging_facts(staging: Staging, plan: Plan, params: Any) -> StagingFacts:
    """Everything `StagingFacts` lists.

    Args:
        staging: the cut model.
        plan: the plan it was cut for.
        params: abstract parameters in the model's own shapes.
    """
    parts, partition, lowered = staging.parts, staging.partition, staging.lowered
    share = shares(parts)
    costs = costs_of(parts, partition, recomputes=recomputes(plan), spread=staging.spread)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    per_layer = sum(sizes[leaf] for kind in parts.stacked for leaf in kind.leaves) // parts.num_layers
    lockstep = simulate(lowered.table, costs, lockstep=True, idle=plan.idle, form=lowered.ticks.form)
    policy = plan.kept_residuals
    ring = lowered.buffer("saved_input" if policy is None else "residual_input")
    each = _kept_bytes(parts, partition, policy)
    backward = [leaf for leaf in parts.message if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    cotangent_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in backward)
    loads = staging.loads
    padding = len(partition.rows) - parts.num_layers if staging.dims else 0
    stored_once = sum(sizes[leaf] for leaf in staging.dims)
    own = own_shares(parts, staging.spread)
    by_cost = replace(staging, partition=Partition.balanced(parts.num_layers, partition.placement, **own))
    return StagingFacts(
        where=parts.where,
        layer_parameters=tuple(_kind_text(kind, staging.paths) for kind in parts.stacked),
        other_parameters=sum(sizes[leaf] for leaf in parts.outer),
        spread_parameters=sum(sizes[leaf] for leaf in staging.spread),
        message=tuple(f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]" for leaf in parts.message),
        message_bytes=parts.message_bytes,
        cotangent_bytes=cotangent_bytes,
        shared_inputs=staging.side_inputs[0],
        sliced_inputs=staging.side_inputs[1],
        side_flops=parts.flops[3],
        layer_flops=parts.flops[1],
        embedding=share["embedding"],
        head=share["head"],
        balance=plan.balance,
        chosen=_balance(partition, loads),
        by_cost=_balance(by_cost.partition, by_cost.loads),
        stages=tuple(
            StageFacts(
                layers=layers,
                load=loads[rank],
                layer_parameters=per_layer * sum(stop - start for start, stop in layers),
                live_microbatches=ring.sizes[rank],
            )
            for rank, layers in enumerate(_layers_of(partition))
        ),
        num_chunks=partition.placement.num_chunks,
        num_microbatches=plan.num_microbatches,
        num_ticks=lowered.num_ticks,
        schedule=lowered.table.name,
        residuals=STAGE if policy is None else str(policy),
        ring_slots=ring.size,
        ring_bytes=None if each is None else ring.size * each,
        bubble_fraction=lockstep.bubble_fraction,
        free_bubble_fraction=simulate(lowered.table, costs).bubble_fraction,
        message_bytes_per_device=_most_sent(lowered, {"F": parts.message_bytes, "B": cotangent_bytes}),
        num_permutes=lockstep.permutes,
        inputs=staging.inputs,
        padded_rows=padding,
        num_rows=len(partition.rows),
        padded_parameters=stored_once // parts.num_layers * padding,
    )


def _kept_bytes(parts: Parts, partition: Partition, policy: Policy | None) -> int | None:
    """What one chunk keeps of one microbatch: its input, or the carry into each of its layers."""
    if policy is None:
        return parts.message_bytes
    carry = sum(leaf.size * leaf.dtype.itemsize for leaf in parts.carry)
    return partition.most * carry if policy.kind == "full" else None


def _kind_text(kind: Stacked, paths: Sequence[str]) -> str:
    """The path of a stacked parameter, or the first and the last of layers that have their own."""
    first, last = paths[kind.leaves[0]], paths[kind.leaves[-1]]
    return first if first == last else f"{first}{SEVERAL}{last}"


def _layers_of(partition: Partition) -> list[tuple[tuple[int, int], ...]]:
    starts, counts = partition.starts, partition.counts
    return [
        tuple((starts[stage], starts[stage] + counts[stage]) for stage in stages)
        for stages in stages_by_rank(partition.placement)
    ]


def _balance(partition: Partition, loads: tuple[float, ...]) -> Balance:
    return Balance(
        layers=tuple(sum(stop - start for start, stop in layers) for layers in _layers_of(partition)), loads=loads
    )


def _most_sent(lowered: Lowered, sizes: dict[str, int]) -> int:
    """Bytes of the rank that sends most: a permute sends from every rank it joins, useful or not."""
    sent = [0] * lowered.table.num_ranks
    for channel, sends in zip(lowered.channels, lowered.ticks.sends, strict=True):
        for source, _ in channel.pairs if channel.shift else ():
            sent[source] += sum(sends) * sizes[channel.kind]
    return max(sent)
