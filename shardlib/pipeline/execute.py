"""Runs a lowered schedule: one `lax.scan` over ticks, inside a region manual over `stage` and the data-like axes.

In: a cut loss, its passes, a `Lowered`. Out: gradients of this rank's layers and of all other parameters, summed over
its microbatches, and the sums of the loss.

    run = Executor(parts=parts, passes=passes, lowered=lowered, partition=partition, ...)
    row_grads, outer_grads, results = run.gradients(rows, outer, pieces, scales)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.pipeline.feeds import AGAIN, FIRST, LAST, NO_FEEDS, Feeds
from shardlib.pipeline.joint import BACK, ENTRY, EXIT, Joint, in_tick
from shardlib.pipeline.lowered import Lowered
from shardlib.pipeline.partition import Partition
from shardlib.pipeline.parts import Leaves, Parts
from shardlib.pipeline.passes import Chosen, Passes, chosen_of, merged
from shardlib.pipeline.placement import stages_by_rank
from shardlib.pipeline.rings import Packing, make_ring, read, write, zeros
from shardlib.pipeline.ticks import Channel

STAGE = "stage"
ENTERED = "joint.entered"
MESSAGE_SCOPE = "pipeline_message"
"""The scope that our own permutes are named by in a compiled program."""

Rings = dict[str, Leaves]
Sums = dict[str, Leaves]
Now = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """One schedule over one cut loss; a static value.

    Args:
        parts: the cut loss.
        passes: both passes of a stage.
        lowered: the schedule.
        partition: layers per virtual stage.
        chosen: what has gradients.
        objective: (outer, piece, message) -> ((total, per_microbatch), all results); the head and the loss.
        skip: branch around idle slots; else compute and discard.
        split: whether the compiler may split messages over mesh axes of its own.
        inside: update rings within the branches, else outside; the same values.
        fetch: (one chunk's parameters as they are held, a value of the tick) -> (whole ones, that value).
        joint: how all ranks compute embedding and head together; None where their own stages do.
        feeds: how inputs travel that the stages hold in parts.
    """

    parts: Parts
    passes: Passes
    lowered: Lowered
    partition: Partition
    chosen: Chosen
    objective: Callable[[Leaves, Leaves, Leaves], tuple[tuple[Any, Any], Leaves]]
    skip: bool
    split: bool
    inside: bool
    fetch: Callable[[Leaves, Any], tuple[Leaves, Any]] = lambda rows, turn: (rows, turn)
    joint: Joint | None = None
    feeds: Feeds = NO_FEEDS

    def gradients(
        self, rows: Leaves, outer: Leaves, pieces: Leaves, scales: tuple[Any, Any]
    ) -> tuple[Leaves, Leaves, Leaves]:
        """Runs all ticks.

        Args:
            rows: parameters of this rank's layers, [chunks, most, ...] each, as `fetch` takes them.
            outer: all other parameters, whole.
            pieces: microbatches, [num_microbatches, ...] each; where held in parts, this rank's.
            scales: cotangents of (total, per_microbatch).

        Returns:
            Gradients of the chosen rows and of the chosen outer parameters in float32, and the sums of the results.
            The last two are this rank's terms of a sum over `stage`.
        """
        rank = jax.lax.axis_index(STAGE)
        arrays = self.lowered.arrays()
        joint = self.joint.grids(arrays) if self.joint else {}
        grids = by_rank({**arrays, **joint, **self.feeds.arrays()}, rank)
        stages = jnp.asarray(stages_by_rank(self.partition.placement))[rank]
        tick = _Tick(self, rows, outer, pieces, scales, stages)
        start = (self._rings(), self._sums(rows, outer, pieces), self.feeds.start(pieces))
        (_, sums, _), _ = jax.lax.scan(lambda state, now: tick(state, now), start, grids)
        return sums["rows"], sums["outer"], sums["results"]

    def _rings(self) -> Rings:
        size = lambda name: self.lowered.buffer(name).size  # noqa: E731
        rings = {
            self.input_ring: self.packing("F").ring(slots=size(self.input_ring)),
            "cotangent": self.packing("B").ring(slots=size("cotangent")),
        }
        if not self.passes.keeps_input:
            rings["residual_input"] = make_ring(self.passes.saved, slots=size("residual_input"))
        return rings

    def _sums(self, rows: Leaves, outer: Leaves, pieces: Leaves) -> Sums:
        piece = jax.tree.map(lambda leaf: leaf[0], pieces)
        _, results = jax.eval_shape(self.objective, outer, piece, list(self.parts.message))
        wide = lambda leaves: [jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves]  # noqa: E731
        return {
            "rows": wide(chosen_of(self._whole(rows), self.chosen.rows)),
            "outer": wide(chosen_of(outer, self.chosen.outer)),
            "results": zeros(results),
        }

    def _whole(self, rows: Leaves) -> Leaves:
        """The parameters of all chunks as their gradients are accumulated, abstract."""
        shapes, _ = jax.eval_shape(self.fetch, [leaf[0] for leaf in rows], jnp.int32(0))
        return [
            jax.ShapeDtypeStruct((held.shape[0], *leaf.shape), leaf.dtype)
            for held, leaf in zip(rows, shapes, strict=True)
        ]

    @property
    def input_ring(self) -> str:
        """The buffer of the lowered table that activations wait in."""
        return "saved_input" if self.passes.keeps_input else "input"

    @property
    def cotangent(self) -> Leaves:
        """What travels backwards, abstract: the part of the message that has gradients."""
        return chosen_of(self.parts.message, self.chosen.message)

    def packing(self, kind: str) -> Packing:
        """How activations ("F") or cotangents ("B") travel."""
        return packing(self.parts, None if kind == "F" else self.chosen.message, split=self.split)


def packing(parts: Parts, chosen: tuple[bool, ...] | None, *, split: bool) -> Packing:
    """How the messages of a cut loss travel, or what is chosen of them."""
    chosen = (True,) * len(parts.message) if chosen is None else chosen
    specs = tuple(chosen_of(parts.message_specs, chosen)) if split else None
    return Packing(value=tuple(chosen_of(parts.message, chosen)), specs=specs)


@dataclass(frozen=True, slots=True)
class _Tick:
    """One tick: F, then B, then messages; beside them the inputs of the next tick."""

    of: Executor
    rows: Leaves
    outer: Leaves
    pieces: Leaves
    scales: tuple[Any, Any]
    stages: Any

    def __call__(self, state: tuple[Rings, Sums, Rings], now: Now) -> tuple[tuple[Rings, Sums, Rings], None]:
        rings, sums, arrived = state
        now = {**now, **arrived}
        if self.of.joint is None:
            rings, sums, sent = self._when("F", self._forward, rings, sums, now)
            rings, sums, returned = self._when("B", self._backward, rings, sums, now)
        else:
            now = {**now, ENTERED: self._entered(now)}
            rings, sums, sent = self._when("F", self._forward, rings, sums, now)
            rings, sums = self._joint_head(self.of.joint, sent, rings, sums, now)
            rings, sums, returned = self._when("B", self._backward, rings, sums, now)
            sums = self._joint_embedding(self.of.joint, returned, sums, now)
        for channel in self.of.lowered.channels:
            rings = self._deliver(channel, sent if channel.kind == "F" else returned, rings, now)
        return (rings, sums, self.of.feeds.fetched(self.pieces, now, axis=STAGE)), None

    def _when(self, kind: str, work: Any, rings: Rings, sums: Sums, now: Now) -> tuple[Rings, Sums, Leaves]:
        """Runs an action in the ticks in which this rank has one."""
        of, active = self.of, now[f"{kind}.microbatch"] >= 0
        nothing = of.packing(kind).zeros()
        written = lambda rings, values: {  # noqa: E731
            name: write(ring, values[name], now[f"{name}.write.{kind}"]) if name in values else ring
            for name, ring in rings.items()
        }
        if not of.skip:
            values, new, sent = work(rings, sums, now, active)
            sums = jax.tree.map(lambda new, old: jnp.where(active, new, old), new, sums)
            return written(rings, values), sums, sent
        if of.inside:

            def busy(rings: Rings, sums: Sums) -> Any:
                values, sums, sent = work(rings, sums, now, True)
                return written(rings, values), sums, sent

            return jax.lax.cond(active, busy, lambda rings, sums: (rings, sums, nothing), rings, sums)
        # The branches hand back the values of one slot; the rings stay outside of them and are not copied.
        shapes, _, _ = jax.eval_shape(lambda rings, sums: work(rings, sums, now, True), rings, sums)
        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        values, sums, sent = jax.lax.cond(
            active, lambda sums: work(rings, sums, now, True), lambda sums: (none, sums, nothing), sums
        )
        return written(rings, values), sums, sent

    def _forward(self, rings: Rings, sums: Sums, now: Now, active: Any) -> tuple[Rings, Sums, Leaves]:
        of = self.of
        chunk = now["F.chunk"]
        rows, microbatch = self._chunk(chunk, now["F.microbatch"])
        stage, piece = self.stages[chunk], self._piece(microbatch, now, None)
        is_first, is_last = stage == 0, stage == len(of.partition.counts) - 1
        placed = of.packing("F").placed
        first = lambda: now[ENTERED] if of.joint else self._first(self._piece(microbatch, now, FIRST))  # noqa: E731
        arrived = lambda: placed(read(rings[of.input_ring], now[f"{of.input_ring}.read.F"]))  # noqa: E731
        message = self._either(is_first, first, arrived)
        made, saved = of.passes.forward(rows, self.outer, piece, stage, message)
        made = placed(made)

        values: Rings = {of.input_ring: message} if of.passes.keeps_input else {"residual_input": saved}
        if of.joint:
            return values, sums, made

        def head() -> tuple[Leaves, Leaves, Leaves]:
            cotangent, grads, results = self._head(self._piece(microbatch, now, LAST), made)
            return cotangent, _added(sums["outer"], grads), jax.tree.map(jnp.add, sums["results"], results)

        skipped = lambda: (of.packing("B").zeros(), sums["outer"], sums["results"])  # noqa: E731
        values["cotangent"], outer, results = self._either(is_last, head, skipped)
        return values, {**sums, "outer": outer, "results": results}, made

    def _first(self, piece: Leaves) -> Leaves:
        """The message into the first layer."""
        made = self.of.parts.pre(self.outer, piece)
        return self.of.packing("F").placed([*made, *zeros(self.of.parts.outputs)])

    def _entered(self, now: Now) -> Leaves:
        """The message of the microbatch that enters the layers in this tick, made by all ranks together."""
        first = lambda: self._first(self._piece(now[ENTRY], now, FIRST))  # noqa: E731
        return in_tick(now[ENTRY], first, self.of.packing("F").zeros)

    @jax.named_scope("head")
    def _head(self, piece: Leaves, message: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """The loss of a microbatch: the cotangent of the last message, gradients of parameters, results."""
        chosen = self.of.chosen

        def objective(outer: Leaves, differentiable: Leaves) -> Any:
            return self.of.objective(
                merged(outer, self.outer, chosen.outer), piece, merged(differentiable, message, chosen.message)
            )

        # At its final scale from the start, so that low precision rounds it as it does on one device.
        _, pull, results = jax.vjp(
            objective, chosen_of(self.outer, chosen.outer), chosen_of(message, chosen.message), has_aux=True
        )
        grads, cotangent = pull(self.scales)
        return self.of.packing("B").placed(cotangent), grads, results

    def _joint_head(self, joint: Joint, sent: Leaves, rings: Rings, sums: Sums, now: Now) -> tuple[Rings, Sums]:
        """The loss of the microbatch that leaves the layers in this tick, by all ranks; the last one keeps it."""
        of = self.of
        spread = tuple(chosen_of(joint.spread, of.chosen.outer))

        def work() -> tuple[Leaves, Leaves, Leaves]:
            message = joint.from_rank(of.packing("F"), sent, joint.last)
            cotangent, grads, results = self._head(self._piece(now[EXIT], now, LAST), message)
            is_last = jax.lax.axis_index(STAGE) == joint.last
            results = jax.tree.map(lambda held, new: held + jnp.where(is_last, new, 0), sums["results"], results)
            return cotangent, joint.added(sums["outer"], grads, spread, joint.last), results

        nothing = lambda: (of.packing("B").zeros(), sums["outer"], sums["results"])  # noqa: E731
        cotangent, outer, results = in_tick(now[EXIT], work, nothing)
        ring = write(rings["cotangent"], cotangent, now["cotangent.write.F"])
        return {**rings, "cotangent": ring}, {**sums, "outer": outer, "results": results}

    def _joint_embedding(self, joint: Joint, returned: Leaves, sums: Sums, now: Now) -> Sums:
        """Gradients of what comes before the layers, by all ranks, for the microbatch that B ends."""
        spread = tuple(chosen_of(joint.spread, self.of.chosen.outer))

        def work() -> Leaves:
            message = joint.from_rank(self.of.packing("B"), returned, joint.first)
            grads = self._embedding(self._piece(now[BACK], now, AGAIN), message)
            return joint.added(sums["outer"], grads, spread, joint.first)

        return {**sums, "outer": in_tick(now[BACK], work, lambda: sums["outer"])}

    def _backward(self, rings: Rings, sums: Sums, now: Now, active: Any) -> tuple[Rings, Sums, Leaves]:
        of = self.of
        chunk = now["B.chunk"]
        held, microbatch = self._chunk(chunk, now["B.microbatch"])
        stage, piece = self.stages[chunk], self._piece(microbatch, now, None)
        kept = of.input_ring if of.passes.keeps_input else "residual_input"
        saved = read(rings[kept], now[f"{kept}.read.B"])
        cotangent = read(rings["cotangent"], now["cotangent.read.B"])
        rows, outer, returned = of.passes.backward(held, self.outer, piece, stage, saved, cotangent)
        outer, returned = _added(sums["outer"], outer), of.packing("B").placed(returned)
        if not of.joint:
            again = lambda: self._embedding(self._piece(microbatch, now, AGAIN), returned)  # noqa: E731
            outer = self._either(stage == 0, lambda: _added(outer, again()), lambda: outer)
        return {}, {**sums, "rows": _added_at(sums["rows"], rows, chunk), "outer": outer}, returned

    @jax.named_scope("embedding")
    def _embedding(self, piece: Leaves, returned: Leaves) -> Leaves:
        """Gradients of what comes before the layers."""
        of, chosen = self.of, self.of.chosen
        num_carry = len(of.parts.carry)

        def carry(outer: Leaves) -> Leaves:
            made = of.parts.pre(merged(outer, self.outer, chosen.outer), piece)
            return chosen_of(made, chosen.message[:num_carry])

        made, pull = jax.vjp(carry, chosen_of(self.outer, chosen.outer))
        (grads,) = pull(returned[: len(made)])
        return grads

    def _either(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return either(condition, yes, no, skip=self.of.skip)

    def _piece(self, microbatch: Any, now: Now, reader: str | None) -> Leaves:
        """A microbatch as the layers (None) or another reader may read it."""
        return self.of.feeds.completed(at_index(self.pieces, microbatch), now, reader)

    def _chunk(self, chunk: Any, microbatch: Any) -> tuple[Leaves, Any]:
        return self.of.fetch(at_index(self.rows, chunk), microbatch)

    def _deliver(self, channel: Channel, value: Leaves, rings: Rings, now: Now) -> Rings:
        name = self.of.input_ring if channel.kind == "F" else "cotangent"
        return deliver(channel, self.of.packing(channel.kind), value, rings, now, ring=name)


def by_rank(arrays: dict[str, Any], rank: Any) -> Now:
    """Grids [ticks, ranks] as this rank's column, [ticks]; what is the same for all ranks as it is."""
    return {
        name: jnp.take(jnp.asarray(grid), rank, axis=1) if grid.ndim == 2 else jnp.asarray(grid)
        for name, grid in arrays.items()
    }


def at_index(leaves: Leaves, index: Any) -> Leaves:
    """The entry along dim 0 of every array; index -1, of an idle slot, takes the first."""
    return [
        leaf[0] if leaf.shape[0] == 1 else jax.lax.dynamic_index_in_dim(leaf, jnp.maximum(index, 0), 0, keepdims=False)
        for leaf in leaves
    ]


def either(condition: Any, yes: Callable[[], Any], no: Callable[[], Any], *, skip: bool) -> Any:
    """One of two values: by a branch, or by computing both."""
    if skip:
        return jax.lax.cond(condition, yes, no)
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes(), no())


def deliver(channel: Channel, packing: Packing, value: Leaves, rings: Rings, now: Now, *, ring: str) -> Rings:
    """Sends what some rank has made to who waits for it; a permute runs only in ticks in which one is needed."""
    packed = packing.pack(value)
    if channel.shift:

        def permuted(packed: Leaves) -> Leaves:
            with jax.named_scope(MESSAGE_SCOPE):
                return [jax.lax.ppermute(leaf, STAGE, channel.pairs) for leaf in packed]

        # Every rank takes the same branch: the predicate depends on the tick alone.
        packed = jax.lax.cond(now[f"send.{channel.name}"] > 0, permuted, lambda packed: packed, packed)
    slot = now[f"{ring}.write.{channel.name}"]
    return {**rings, ring: write(rings[ring], packing.unpack(packed), slot)}


def _added(sums: Leaves, more: Leaves) -> Leaves:
    return [held + new.astype(held.dtype) for held, new in zip(sums, more, strict=True)]


def _added_at(sums: Leaves, more: Leaves, chunk: Any) -> Leaves:
    if not sums or sums[0].shape[0] == 1:
        return [held + new[None].astype(held.dtype) for held, new in zip(sums, more, strict=True)]
    return [held.at[chunk].add(new.astype(held.dtype)) for held, new in zip(sums, more, strict=True)]
