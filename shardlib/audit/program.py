"""What a compiled program communicates, as values: collectives, the loops around them, totals, mesh axes.

In: values that `hlo.parse` makes. Out: bytes, counts and the mesh axes of each collective.

    program.totals["all-reduce"].bytes_per_device    # None when some loop's trip count depends on data
    axes_of(program.collectives[0], MeshShape.parse("data=2,tensor=4")).axes    # ("tensor",)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshes.errors import ShardingError, nearest
from meshes.shape import MeshShape
from shardlib.audit.hlo_text import Shape
from shardlib.audit.replica_groups import AxisMatch, Groups, axes_of_groups, axes_of_pairs
from shardlib.cost.collectives import KINDS, ring_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One `while` around a collective; a static leaf.

    Args:
        name: of the `while` instruction, unique in the program.
        part: `body`, or `condition`, which runs once more than the body.
        trip_count: executions of this part each time the loop is reached; None when it depends on data.
    """

    name: str
    part: str
    trip_count: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the program, an asynchronous pair counted once; a static leaf.

    Args:
        kind: XLA's name without `-start`, one of `shardlib.cost.collectives.KINDS`.
        name: of the instruction, unique within its computation.
        groups: device ids that take part together; empty for a permute.
        pairs: (source, target) device ids of a permute; empty otherwise.
        operands: arrays that go in; the several ones of a merged collective in order.
        results: arrays that come out.
        loops: the loops around it, outermost first.
        branches: `conditional.1[0]` for each conditional around it and the branch it sits in, outermost first.
        is_async: split into a start and a done.
        op_name: the traced operation, such as `jit(step)/transpose/dot_general`, None when the program has none.
        source: (file, line) of the Python stack, innermost first; empty when the program has none.
        line_number: in the program text, from 1.
    """

    kind: str
    name: str
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    loops: tuple[Loop, ...]
    branches: tuple[str, ...]
    is_async: bool
    op_name: str | None
    source: tuple[tuple[str, int], ...]
    line_number: int

    @property
    def operand_bytes(self) -> int:
        """Bytes of data that go in on one device; offsets and sizes of a ragged all-to-all are not data."""
        return _num_bytes(self.operands[:1] if self.kind == "ragged-all-to-all" else self.operands)

    @property
    def result_bytes(self) -> int:
        """Bytes that come out on one device."""
        return _num_bytes(self.results)

    @property
    def group_size(self) -> int:
        """Devices of the largest group; for a permute 2, or 1 when every device sends to itself."""
        if self.kind == "collective-permute":
            return 2 if any(source != target for source, target in self.pairs) else 1
        return max(map(len, self.groups))

    @property
    def bytes_per_device(self) -> float:
        """Bytes each device sends in one execution under ring algorithms (`cost.collectives.ring_bytes`)."""
        buffer_bytes = self.result_bytes if self.kind == "all-gather" else self.operand_bytes
        return ring_bytes(self.kind, buffer_bytes=buffer_bytes, group_size=self.group_size)

    @property
    def loop_depth(self) -> int:
        """Number of loops around it."""
        return len(self.loops)

    @property
    def in_branch(self) -> bool:
        """True when a conditional decides whether it runs."""
        return bool(self.branches)

    @property
    def times_executed(self) -> int | None:
        """Product of the trip counts around it, None when one is unknown; at most this often when `in_branch`."""
        counts = [loop.trip_count for loop in self.loops]
        return None if None in counts else math.prod(count for count in counts if count is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over some collectives of one program run, on one device; a static leaf.

    Args:
        num_instructions: collectives in the text.
        num_in_branch: how many of them sit under a conditional; the sums take them as always executed.
        times_executed: executions, loops multiplied out; None when `unknown` is not empty.
        operand_bytes: bytes that go in; None when `unknown` is not empty.
        bytes_per_device: bytes sent under ring algorithms; None when `unknown` is not empty.
        unknown: names of the loops whose trip count depends on data.
    """

    num_instructions: int
    num_in_branch: int
    times_executed: int | None
    operand_bytes: int | None
    bytes_per_device: float | None
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one compiled program communicates; a static leaf.

    Args:
        num_devices: replicas times partitions.
        collectives: in the order of the text, callees in the place of their call.
        loops: every loop that can be reached, with its body's trip count, outermost first.
    """

    num_devices: int
    collectives: tuple[Collective, ...]
    loops: tuple[Loop, ...]

    def of_kind(self, kind: str) -> tuple[Collective, ...]:
        """The collectives of one kind.

        Raises:
            ShardingError: no such kind.
        """
        if kind not in KINDS:
            raise ShardingError(
                f"{kind!r} is not a collective{nearest(kind, KINDS)}", fix=f"use one of {', '.join(KINDS)}"
            )
        return tuple(collective for collective in self.collectives if collective.kind == kind)

    @property
    def totals(self) -> Mapping[str, Totals]:
        """Totals of each kind that occurs."""
        kinds = {collective.kind for collective in self.collectives}
        return {kind: totals(self.of_kind(kind)) for kind in KINDS if kind in kinds}


def totals(collectives: tuple[Collective, ...], /) -> Totals:
    """Sums over any selection of collectives; loops multiplied out, unknown trip counts named rather than guessed."""
    unknown = {loop.name: None for each in collectives for loop in each.loops if loop.trip_count is None}
    times = [each.times_executed for each in collectives]
    known = [count for count in times if count is not None]
    weighted = list(zip(known, collectives, strict=True)) if not unknown else []
    return Totals(
        num_instructions=len(collectives),
        num_in_branch=sum(each.in_branch for each in collectives),
        times_executed=None if unknown else sum(known),
        operand_bytes=None if unknown else sum(count * each.operand_bytes for count, each in weighted),
        bytes_per_device=None if unknown else sum((count * each.bytes_per_device for count, each in weighted), 0.0),
        unknown=tuple(unknown),
    )


def axes_of(collective: Collective, mesh_shape: MeshShape, /) -> AxisMatch:
    """The mesh axes a collective runs over, for a program compiled on that mesh.

    Device ids in a program are positions in the row-major mesh, whatever the physical devices.

    Returns:
        Axes in mesh order; empty when nothing moves; None, with the reason, when the groups are not whole lines.
    """
    if collective.kind == "collective-permute":
        return axes_of_pairs(collective.pairs, mesh_shape=mesh_shape)
    return axes_of_groups(collective.groups, mesh_shape=mesh_shape)


def _num_bytes(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.num_bytes for shape in shapes)
