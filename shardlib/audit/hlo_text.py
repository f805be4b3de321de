"""XLA program text as computations of instructions; nothing is interpreted yet.

In: `compiled.as_text()`. Out: a `Module` to look names up in, or an error that quotes the line.

    read(text).entry.root.opcode    # "tuple"
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshes.errors import ShardingError

_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s+(?:\(.*)?\{\s*\Z")
_NAMED = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+) = ", re.ASCII)
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[((?:<=)?\d{1,18}(?:,(?:<=)?\d{1,18})*)?\](?:\{[^{}]*\})?", re.ASCII)
_OPERAND_NAME = re.compile(r"%?([\w.\-]+)\Z")
_TABLE_ROW = re.compile(r"(\d{1,9}) (.*)", re.ASCII)
_MAX_NESTING = 32
_KERNEL_METADATA = "frontend_attributes={kernel_metadata={"

_BITS: Final[Mapping[str, int]] = {
    "pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"f{bits}": bits for bits in (16, 32, 64)},
    **{f"f8{form}": 8 for form in ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    "f4e2m1fn": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dtype (XLA's name, such as `f32`) and dims of one array; a static leaf."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes; types below a byte count as packed, rounded up."""
        return -(-math.prod(self.dims) * _BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation, split but not interpreted; a static leaf."""

    name: str
    opcode: str
    type_text: str
    tail: str
    """What follows the opening parenthesis of the operands."""
    line: str
    line_number: int

    def error(self, what: str, *, fix: str | None = None) -> ShardingError:
        """An error that quotes this line."""
        return line_error(what, self.line, line_number=self.line_number, fix=fix)

    def operands(self) -> tuple[str, ...]:
        """Operand names, without `%` and without the types some printers repeat.

        Raises:
            ShardingError: the operand list does not close, or holds something that is not a name.
        """
        inside, _ = self._split()
        names = []
        for operand in _split_commas(inside):
            name = _OPERAND_NAME.match(operand.strip().rpartition(" ")[2])
            if name is None:
                raise self.error(f"operand {operand.strip()!r} is not a name")
            names.append(name[1])
        return tuple(names)

    def literal(self) -> str:
        """The text between the parentheses: the value of a constant, the number of a parameter."""
        return self._split()[0].strip()

    def attributes(self) -> str:
        """The text after the operands, every quoted string emptied."""
        return self._split()[1]

    def attribute(self, key: str) -> str | None:
        """The value of `key=` up to the next comma outside brackets, None when there is none."""
        return next(
            (value for name, _, value in map(_partition, _split_commas(self.attributes())) if name == key and value),
            None,
        )

    def shapes(self) -> tuple[tuple[Shape, ...], ...]:
        """Arrays of the result type: one group per element of a tuple, each flattened; one group if no tuple.

        Raises:
            ShardingError: the type cannot be read.
        """
        text = _COMMENT.sub("", self.type_text).strip()
        if not text.startswith("("):
            return (self._flat(text, depth=0),)
        return tuple(self._flat(part, depth=1) for part in _split_commas(text[1:-1]))

    def _flat(self, text: str, *, depth: int) -> tuple[Shape, ...]:
        text = text.strip()
        if text.startswith("(") and text.endswith(")") and depth < _MAX_NESTING:
            return tuple(shape for part in _split_commas(text[1:-1]) for shape in self._flat(part, depth=depth + 1))
        array = _ARRAY.fullmatch(text)
        if array is None or array[1] not in _BITS:
            raise self.error(f"{text!r} is not an array type this reader knows")
        dims = tuple(int(size.removeprefix("<=")) for size in array[2].split(",")) if array[2] else ()
        return (Shape(dtype=array[1], dims=dims),)

    def _split(self) -> tuple[str, str]:
        """Operand text and attribute text, comments and quoted strings removed."""
        text = _COMMENT.sub("", _QUOTED.sub('""', self.tail))
        depth = 1
        for match in re.finditer(r"[(){}]", text):
            depth += 1 if match[0] in "({" else -1
            if depth == 0:
                return text[: match.start()], text[match.end() :]
        raise self.error("the operand list does not close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """Instructions by name, in program order, and the root; a static leaf."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """The instruction that makes operand `index`, None when it does not exist."""
        names = instruction.operands()
        return self.instructions.get(names[index]) if index < len(names) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A whole program; a static leaf.

    Args:
        computations: by name.
        entry: where execution starts.
        replica_count: copies of the SPMD program; devices number replica_count * num_partitions.
        num_partitions: devices of one copy.
        frames: for each `stack_frame_id`, its (file, line) pairs, innermost first.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    replica_count: int
    num_partitions: int
    frames: Mapping[int, tuple[tuple[str, int], ...]]


def read(text: str, /) -> Module:
    """Splits program text into computations and instructions.

    Raises:
        ShardingError: a line inside a computation is not an instruction, or the text stops early.
    """
    lines = _whole_lines(text)
    header = next((line for line in lines if line.startswith("HloModule")), None)
    if header is None:
        raise ShardingError(
            "this is not a compiled program: no line starts with 'HloModule'", fix="pass compiled.as_text()"
        )
    computations: dict[str, Computation] = {}
    entry: str | None = None
    top_level: list[str] = []
    at = 0
    while at < len(lines):
        opened = _HEADER.match(lines[at])
        if opened is None or lines[at].startswith("HloModule"):
            if _NAMED.match(lines[at]):
                raise line_error("an instruction outside of any computation", lines[at], line_number=at + 1)
            top_level.append(lines[at])
            at += 1
            continue
        if opened[2] in computations or (opened[1] and entry is not None):
            raise line_error("a second computation of this name, or a second ENTRY", lines[at], line_number=at + 1)
        computations[opened[2]], at = _read_computation(lines, at, name=opened[2])
        entry = opened[2] if opened[1] else entry
    if entry is None:
        raise ShardingError("the program has no ENTRY computation", fix="pass the whole text of compiled.as_text()")
    return Module(
        computations=computations,
        entry=computations[entry],
        replica_count=_header_count(header, "replica_count"),
        num_partitions=_header_count(header, "num_partitions"),
        frames=_frames(top_level),
    )


def _whole_lines(text: str) -> list[str]:
    """Lines of a program; the printed metadata of a TPU kernel, which has line breaks, on its instruction's line.

    Empty lines take the place of those that moved, so that lines keep their numbers.
    """
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not line.endswith(_KERNEL_METADATA):
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith("}")), None)
        if end is None:
            raise line_error("the metadata of this kernel does not end", line, line_number=at + 1)
        lines[at : end + 1] = ["".join(lines[at : end + 1]), *[""] * (end - at)]
    return lines


def line_error(what: str, line: str, *, line_number: int, fix: str | None = None) -> ShardingError:
    """An error that quotes a line of the program, shortened."""
    line = line.strip()
    quoted = line if len(line) <= 400 else f"{line[:400]} ..."
    return ShardingError(f"compiled program, line {line_number}: {what}\n  {quoted}", fix=fix)


def _read_computation(lines: list[str], start: int, *, name: str) -> tuple[Computation, int]:
    """The computation whose header is `lines[start]`, and the index after its closing brace."""
    instructions: dict[str, Instruction] = {}
    root: Instruction | None = None
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if line.lstrip().startswith("}"):
            if root is None:
                raise line_error("this computation has no ROOT", lines[start], line_number=start + 1)
            return Computation(name=name, instructions=instructions, root=root), at + 1
        if not line.strip():
            continue
        named = _NAMED.match(line)
        opcode = _OPCODE.search(line, named.end() - 1) if named else None
        if named is None or opcode is None:
            raise line_error("not an instruction", line, line_number=at + 1)
        type_text = line[named.end() : opcode.start()]
        if not type_text or (type_text[0] != "(" and " " in type_text):
            raise line_error(f"{type_text!r} is not a type", line, line_number=at + 1)
        instruction = Instruction(
            name=named[2],
            opcode=opcode[1],
            type_text=type_text,
            tail=line[opcode.end() :],
            line=line,
            line_number=at + 1,
        )
        if named[2] in instructions or (named[1] and root is not None):
            raise instruction.error(f"a second instruction named {named[2]!r}, or a second ROOT")
        instructions[named[2]] = instruction
        root = instruction if named[1] else root
    raise line_error("the program ends inside this computation", lines[start], line_number=start + 1)


def _header_count(header: str, key: str) -> int:
    found = re.search(rf"[ ,]{key}=(\d{{1,9}})(?=,|\s|\Z)", _QUOTED.sub('""', header), re.ASCII)
    if found is None and f"{key}=" in header:
        raise line_error(f"{key} is not a number", header, line_number=1)
    return int(found[1]) if found else 1


def _frames(lines: list[str]) -> dict[int, tuple[tuple[str, int], ...]]:
    """Joins the FileNames, FileLocations and StackFrames tables; rows that cannot be read are left out."""
    tables: dict[str, dict[int, str]] = {}
    rows: dict[int, str] = {}
    for line in lines:
        row = _TABLE_ROW.fullmatch(line)
        if row:
            rows[int(row[1])] = row[2]
        elif line and not line[0].isspace():
            rows = tables.setdefault(line.strip(), {})
    files = {key: row.strip('"') for key, row in tables.get("FileNames", {}).items()}
    places: dict[int, tuple[str, int]] = {}
    for key, row in tables.get("FileLocations", {}).items():
        file, line_of = _field(row, "file_name_id"), _field(row, "line")
        if file in files and line_of is not None:
            places[key] = (files[file], line_of)
    frames = tables.get("StackFrames", {})
    chains: dict[int, tuple[tuple[str, int], ...]] = {}
    for key in sorted(frames):
        # The printed parent is the parent's id plus one, so that 1 means none; parents come before children.
        parent = (_field(frames[key], "parent_frame_id") or 1) - 1
        place = places.get(_field(frames[key], "file_location_id") or 0)
        above = chains.get(parent, ())
        chains[key] = above if place is None or above[:1] == (place,) else (place, *above)
    return chains


def _field(row: str, key: str) -> int | None:
    found = re.search(rf"[{{ ]{key}=(\d{{1,9}})(?=[ }}])", row, re.ASCII)
    return int(found[1]) if found else None


def _split_commas(text: str) -> list[str]:
    """Splits at commas outside brackets; an empty text has no parts."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[()\[\]{},]", text):
        if match[0] == ",":
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        else:
            depth += 1 if match[0] in "([{" else -1
    parts.append(text[start:])
    return parts if text.strip() else []


def _partition(attribute: str) -> tuple[str, str, str]:
    key, equals, value = attribute.strip().partition("=")
    return key, equals, value
