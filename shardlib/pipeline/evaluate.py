"""Forward passes through the stages: the sums of a loss without gradients.

In: a cut loss and forward-only ticks. Out: the sums of the results over all microbatches.

    evaluator = Evaluator(work=work, ticks=ticks, objective=objective, skip=True, split=False)
    results = evaluator.results(rows, outer, pieces)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.pipeline.execute import ENTERED, STAGE, Now, Rings, at_index, by_rank, deliver, either, packing
from shardlib.pipeline.forward_only import ForwardOnly
from shardlib.pipeline.joint import ENTRY, EXIT, Joint, in_tick
from shardlib.pipeline.parts import Leaves
from shardlib.pipeline.placement import stages_by_rank
from shardlib.pipeline.rings import read, zeros
from shardlib.pipeline.stage import StageWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Forward passes of one cut loss; a static value.

    Args:
        work: what a stage computes.
        ticks: which rank does what when.
        objective: (outer, piece, message) -> (terms, all results); the head and the loss.
        skip: branch around idle slots; else compute and discard.
        split: whether the compiler may split messages over mesh axes of its own.
        fetch: (one chunk's parameters as they are held, a value of the tick) -> (whole ones, that value).
        joint: how all ranks compute embedding and head together; None where their own stages do.
    """

    work: StageWork
    ticks: ForwardOnly
    objective: Callable[[Leaves, Leaves, Leaves], tuple[Any, Leaves]]
    skip: bool
    split: bool
    fetch: Callable[[Leaves, Any], tuple[Leaves, Any]] = lambda rows, turn: (rows, turn)
    joint: Joint | None = None

    def results(self, rows: Leaves, outer: Leaves, pieces: Leaves) -> Leaves:
        """The sums of the results: this rank's terms of a sum over `stage`.

        Args:
            rows: parameters of this rank's layers, [chunks, most, ...] each.
            outer: all other parameters, whole.
            pieces: microbatches, [num_microbatches, ...] each; whole on every stage, for batches have any size here.
        """
        parts, partition = self.work.parts, self.work.partition
        rank = jax.lax.axis_index(STAGE)
        stages = jnp.asarray(stages_by_rank(partition.placement))[rank]
        message, last = parts.message, len(partition.counts) - 1
        sending = packing(parts, None, split=self.split)
        first = [leaf[0] for leaf in pieces]
        _, shapes = jax.eval_shape(self.objective, outer, first, list(message))

        def first_of(piece: Leaves) -> Leaves:
            return sending.placed([*parts.pre(outer, piece), *zeros(parts.outputs)])

        def head(joint: Joint, sent: Leaves, results: Leaves, microbatch: Any) -> Leaves:
            message = joint.from_rank(sending, sent, joint.last)
            made = self.objective(outer, at_index(pieces, microbatch), message)[1]
            return jax.tree.map(lambda held, new: held + jnp.where(rank == joint.last, new, 0), results, made)

        def forward(rings: Rings, results: Leaves, now: Now) -> tuple[Leaves, Leaves]:
            chunk = now["F.chunk"]
            held, microbatch = self.fetch(at_index(rows, chunk), now["F.microbatch"])
            piece = at_index(pieces, microbatch)
            stage = stages[chunk]
            start = lambda: now[ENTERED] if self.joint else first_of(piece)  # noqa: E731
            arrived = lambda: sending.placed(read(rings["input"], now["input.read.F"]))  # noqa: E731
            made = either(stage == 0, start, arrived, skip=self.skip)
            made = sending.placed(self.work.forward(held, outer, piece, stage, made))
            if self.joint:
                return made, results
            add = lambda: jax.tree.map(jnp.add, results, self.objective(outer, piece, made)[1])  # noqa: E731
            return made, either(stage == last, add, lambda: results, skip=self.skip)

        def tick(state: tuple[Rings, Leaves], now: Now) -> tuple[tuple[Rings, Leaves], None]:
            rings, results = state
            if self.joint:
                entering = lambda: first_of(at_index(pieces, now[ENTRY]))  # noqa: E731
                now = {**now, ENTERED: in_tick(now[ENTRY], entering, sending.zeros)}
            work, idle = lambda: forward(rings, results, now), lambda: (sending.zeros(), results)
            sent, results = either(now["F.microbatch"] >= 0, work, idle, skip=self.skip)
            if self.joint:
                leaving = functools.partial(head, self.joint, sent, results, now[EXIT])
                results = in_tick(now[EXIT], leaving, lambda: results)
            for channel in self.ticks.channels:
                rings = deliver(channel, sending, sent, rings, now, ring="input")
            return (rings, results), None

        start = ({"input": sending.ring(slots=self.ticks.num_slots)}, zeros(shapes))
        arrays = self.ticks.arrays()
        arrays |= self.joint.grids(arrays) if self.joint else {}
        (_, results), _ = jax.lax.scan(tick, start, by_rank(arrays, rank))
        return results
