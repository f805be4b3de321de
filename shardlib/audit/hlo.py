"""Reads the collectives of a compiled program: kind, devices, arrays, and the loops and branches around each.

In: `compiled.as_text()`. Out: a `Program`, or an error that quotes the line it cannot read: never a miscount.

    program = parse(jax.jit(step).lower(*arguments).compile().as_text())
    program.collectives[0].kind    # "all-reduce"
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from meshes.errors import ShardingError
from shardlib.audit.hlo_text import Computation, Instruction, Module, Shape, read
from shardlib.audit.program import Collective, Loop, Program
from shardlib.audit.replica_groups import Groups, read_groups, read_pairs
from shardlib.audit.trip_count import trip_count
from shardlib.cost.collectives import KINDS

_STARTS: Final = {f"{kind}-start": kind for kind in KINDS}
_IGNORED: Final = {f"{kind}-{suffix}" for kind in KINDS for suffix in ("done", "update")}
_LOOKS_COLLECTIVE = re.compile(r"all-|collective-|reduce-scatter|ragged-all")
_DEVICE_LISTS: Final = ("replica_groups=", "source_target_pairs=")
_POINT_TO_POINT: Final = ("send", "recv")
_METADATA_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_METADATA_FRAME = re.compile(r"stack_frame_id=(\d{1,9})", re.ASCII)
_METADATA_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d{1,9})', re.ASCII)


def parse(text: str, /) -> Program:
    """Reads the collectives of a compiled program.

    Args:
        text: `compiled.as_text()`, whole.

    Raises:
        ShardingError: text that is cut or is no program; a collective whose devices, arrays or loop cannot be read;
            sizes that contradict each other; a collective that no call reaches.

    Example:
        >>> parse("HloModule m\\nENTRY e {\\n  ROOT p = f32[] parameter(0)\\n}\\n").collectives
        ()
    """
    module = read(text)
    found = _Reader(module=module)
    collectives = tuple(found.walk(module.entry, loops=(), branches=(), is_async=False))
    found.check_all_reached()
    return Program(
        num_devices=module.replica_count * module.num_partitions, collectives=collectives, loops=tuple(found.loops)
    )


class _Reader:
    """Follows calls from the entry and collects; used once."""

    def __init__(self, *, module: Module):
        self.loops: list[Loop] = []
        self._module = module
        self._reached: set[str] = set()
        self._kinds = {name: _kinds(computation) for name, computation in module.computations.items()}
        self._matters: dict[str, bool | None] = {}

    def walk(
        self, computation: Computation, *, loops: tuple[Loop, ...], branches: tuple[str, ...], is_async: bool
    ) -> Iterator[Collective]:
        """Collectives of a computation and of what it calls."""
        self._reached.add(computation.name)
        if not self._is_of_interest(computation.name, computation.root):
            return
        kinds = self._kinds[computation.name]
        for instruction in computation.instructions.values():
            if instruction.name in kinds:
                kind = kinds[instruction.name]
                where = _Place(loops=loops, branches=branches, is_async=is_async or instruction.opcode != kind)
                yield _collective(instruction, kind=kind, where=where, computation=computation, module=self._module)
            for name, called_as in _calls(instruction):
                inner_loops, inner_branches = loops, branches
                if called_as in ("body", "condition"):
                    loop = self._loop(instruction, called_as, computation=computation)
                    inner_loops = (*loops, loop)
                elif called_as:
                    inner_branches = (*branches, called_as)
                yield from self.walk(
                    self._called(name, instruction),
                    loops=inner_loops,
                    branches=inner_branches,
                    is_async=is_async or instruction.opcode == "async-start",
                )

    def check_all_reached(self) -> None:
        """Raises when a collective sits in a computation that nothing we know calls."""
        wrapped = {  # the printed body of a `-start` that already says everything itself
            name.lstrip("%")
            for computation in self._module.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode in _STARTS
            for name in [instruction.attribute("calls")]
            if name
        }
        for name, kinds in self._kinds.items():
            if kinds and name not in self._reached and name not in wrapped:
                first = self._module.computations[name].instructions[next(iter(kinds))]
                raise first.error(f"no call reaches the computation {name!r} of this collective")

    def _loop(self, instruction: Instruction, part: str, *, computation: Computation) -> Loop:
        count = trip_count(instruction, computation=computation, module=self._module)
        if part == "condition":
            return Loop(name=instruction.name, part=part, trip_count=None if count is None else count + 1)
        loop = Loop(name=instruction.name, part=part, trip_count=count)
        self.loops.append(loop)
        return loop

    def _called(self, name: str, caller: Instruction) -> Computation:
        if name not in self._module.computations:
            raise caller.error(f"it calls {name!r}, which the program does not define")
        return self._module.computations[name]

    def _is_of_interest(self, name: str, caller: Instruction) -> bool:
        """Whether a collective or a loop can be reached from a computation; raises when it calls itself."""
        if name in self._matters:
            known = self._matters[name]
            if known is None:
                raise caller.error(f"the computation {name!r} calls itself")
            return known
        self._matters[name] = None
        found = bool(self._kinds[name])
        for instruction in self._module.computations[name].instructions.values():
            for callee, called_as in _calls(instruction):
                inner = self._called(callee, instruction)
                found |= self._is_of_interest(inner.name, instruction) or called_as == "body"
        self._matters[name] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    loops: tuple[Loop, ...]
    branches: tuple[str, ...]
    is_async: bool


def _kinds(computation: Computation) -> dict[str, str]:
    """Kind of each collective of a computation by instruction name; raises on what only looks like one."""
    kinds: dict[str, str] = {}
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        kind = opcode if opcode in KINDS else _STARTS.get(opcode)
        if kind:
            kinds[instruction.name] = kind
            continue
        if _LOOKS_COLLECTIVE.match(opcode) and opcode not in _IGNORED:
            raise instruction.error(f"{opcode!r} looks like a collective that this reader does not know")
        if any(key in instruction.line for key in _DEVICE_LISTS) and any(
            key in instruction.attributes() for key in _DEVICE_LISTS
        ):
            raise instruction.error(f"{opcode!r} names groups of devices, yet it is not a collective we know")
        if opcode in _POINT_TO_POINT and instruction.attribute("is_host_transfer") != "true":
            raise instruction.error(f"{opcode!r} between devices is not counted by this reader")
    return kinds


def _calls(instruction: Instruction) -> list[tuple[str, str]]:
    """Computations an instruction runs: name, and `body`, `condition`, `name[branch]` or nothing."""
    opcode = instruction.opcode
    if opcode == "while":
        return [(_required(instruction, part), part) for part in ("condition", "body")]
    if opcode == "conditional":
        listed = instruction.attribute("branch_computations")
        if listed is None:
            names = [_required(instruction, f"{side}_computation") for side in ("true", "false")]
        else:
            names = [name.strip().lstrip("%") for name in listed.strip("{}").split(",")]
        return [(name, f"{instruction.name}[{index}]") for index, name in enumerate(names)]
    if opcode == "call":
        key = "calls" if "calls=" in instruction.attributes() else "to_apply"
        return [(_required(instruction, key), "")]
    if opcode in ("fusion", "async-start"):
        return [(_required(instruction, "calls"), "")]
    if opcode == "custom-call" and ("calls=" in instruction.line or "called_computations=" in instruction.line):
        listed = instruction.attribute("called_computations") or instruction.attribute("calls") or ""
        return [(name.strip().lstrip("%"), "") for name in listed.strip("{}").split(",") if name.strip()]
    return []


def _required(instruction: Instruction, key: str) -> str:
    value = instruction.attribute(key)
    if value is None:
        raise instruction.error(f"{instruction.opcode!r} has no {key}=")
    return value.lstrip("%")


def _collective(
    instruction: Instruction, *, kind: str, where: _Place, computation: Computation, module: Module
) -> Collective:
    """Reads one collective and checks that its sizes agree."""
    operands: list[Shape] = []
    for name in instruction.operands():
        if name not in computation.instructions:
            raise instruction.error(f"operand {name!r} is not defined in {computation.name!r}")
        operands += [shape for part in computation.instructions[name].shapes() for shape in part]
    parts = instruction.shapes()
    if instruction.opcode != kind and kind != "all-reduce":
        parts = parts[1:2]  # (operands, results, contexts...)
    attributes = instruction.attributes()
    try:
        pairs = read_pairs(_after(instruction, "source_target_pairs=")) if kind == "collective-permute" else ()
        groups = _flattened(instruction, kind=kind, module=module) if kind != "collective-permute" else ()
    except ShardingError as error:
        raise error if str(error).startswith("compiled program") else instruction.error(str(error)) from error
    if "slice_sizes=" in attributes:
        raise instruction.error("a permute of slices is not counted by this reader")
    name = _METADATA_NAME.search(instruction.line)
    collective = Collective(
        kind=kind,
        name=instruction.name,
        groups=groups,
        pairs=pairs,
        operands=tuple(operands),
        results=tuple(shape for part in parts for shape in part),
        loops=where.loops,
        branches=where.branches,
        is_async=where.is_async,
        op_name=name[1] if name else None,
        source=_source(instruction, module=module),
        line_number=instruction.line_number,
    )
    _check(collective, instruction=instruction, module=module)
    return collective


def _after(instruction: Instruction, key: str) -> str:
    """The attribute text after `key`, which must be there once; quoted mesh axis names survive."""
    before, found, after = instruction.attributes().partition(f", {key}")
    if not found or key in after or key in before:
        raise instruction.error(f"this collective needs exactly one {key}")
    return after


def _flattened(instruction: Instruction, *, kind: str, module: Module) -> Groups:
    """Replica groups as device ids, replica * num_partitions + partition, whichever ids the line is written in.

    Three readings: with `use_global_device_ids` the ids are these already; otherwise they are partitions within each
    replica for a permute-like kind with a channel, whole replicas with all partitions joined for a reducing kind with
    a channel, and replicas at each partition without a channel (XLA's collective group modes).
    """
    replicas, partitions = module.replica_count, module.num_partitions
    written = read_groups(_after(instruction, "replica_groups="))
    is_global = instruction.attribute("use_global_device_ids") == "true"
    has_channel = instruction.attribute("channel_id") is not None
    joins_partitions = kind in ("all-reduce", "all-gather", "reduce-scatter")
    within = joins_partitions or not has_channel
    ids = replicas * partitions if is_global else replicas if within else partitions
    written = written or (tuple(range(ids)),)
    if sorted(device for group in written for device in group) != list(range(ids)):
        raise instruction.error(f"the replica groups do not hold each of {ids} ids once")
    if is_global:
        return written
    if not within:
        return tuple(tuple(r * partitions + p for p in group) for r in range(replicas) for group in written)
    if has_channel:
        return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in written)
    return tuple(tuple(r * partitions + p for r in group) for p in range(partitions) for group in written)


def _check(collective: Collective, *, instruction: Instruction, module: Module) -> None:
    """Raises when operands, results and group size contradict each other."""
    devices = module.replica_count * module.num_partitions
    if any(device >= devices for pair in collective.pairs for device in pair):
        raise instruction.error(f"a pair names a device beyond the {devices} of the program")
    if not collective.operands or not collective.results:
        raise instruction.error("this collective has no operand or no result")
    sizes = {len(group) for group in collective.groups}
    # Reductions are compared by elements: the TPU compiler makes some whose result has another dtype.
    is_reduction = collective.kind in ("all-reduce", "reduce-scatter")
    given = _num_elements(collective.operands) if is_reduction else collective.operand_bytes
    made = _num_elements(collective.results) if is_reduction else collective.result_bytes
    scaled = {"all-gather": given, "reduce-scatter": made}.get(collective.kind)
    if scaled is not None and len(sizes) != 1:
        raise instruction.error("its groups differ in size")
    whole = made if collective.kind == "all-gather" else given
    expected = scaled * max(sizes) if scaled is not None else made
    if collective.kind != "ragged-all-to-all" and whole != expected:
        what = f"{collective.operand_bytes} bytes in, {collective.result_bytes} bytes out, groups of {sizes or 'pairs'}"
        raise instruction.error(f"sizes that contradict each other: {what}")


def _source(instruction: Instruction, *, module: Module) -> tuple[tuple[str, int], ...]:
    frame, inline = _METADATA_FRAME.search(instruction.line), _METADATA_SOURCE.search(instruction.line)
    if inline:
        return ((inline[1], int(inline[2])),)
    return module.frames.get(int(frame[1]), ()) if frame else ()


def _num_elements(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape.dims) for shape in shapes)
