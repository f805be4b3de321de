"""Schedules as values: `Action`, `Table`, and their text, CSV and JSON forms.

In: text such as `F0,F1,B0,B1`, one line per rank, in the order in which that rank works. Out: a frozen `Table`,
or an error that points at the cell. Times are no part of a table: `simulate` finds them, `lower` fixes them.

    Table.parse("F0 F1 B0 B1").rows[0][2]    # Action(kind='B', microbatch=0, chunk=0)
"""

import functools
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from meshes.errors import ShardingError, caret
from shardlib.pipeline.placement import Placement

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT: Final = "I"
WEIGHT: Final = "W"
KINDS: Final = (FORWARD, BACKWARD, INPUT, WEIGHT)
"""Forward; the whole backward; the input gradient alone; the weight gradient alone."""

MAX_ACTIONS: Final = 4_000_000
_ACTION = re.compile(r"([FBIW])([0-9]{1,6})(?:\.([0-9]{1,4}))?\Z")
_CELL = re.compile(r"[^,\s]+")
_IDLE = {".", "-", "_"}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Action:
    """One piece of work of one rank; a static leaf. Its text is `F3.1`; chunk 0 goes without: `B3`.

    Args:
        kind: one of `KINDS`.
        microbatch: which microbatch, from 0.
        chunk: which of the rank's chunks, from 0.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    @classmethod
    def parse(cls, text: str) -> "Action":
        """`"F3.1"` -> forward of microbatch 3 on chunk 1.

        Raises:
            ShardingError: anything else.
        """
        match = _ACTION.match(text)
        if not match:
            raise ShardingError(
                f"{text!r} is not an action",
                fix="F, B, I or W (forward, backward, input gradient, weight gradient), a microbatch, "
                "and for chunks after the first a dot and the chunk: F3, B3, W3.1",
            )
        return action(match[1], int(match[2]), chunk=int(match[3] or 0))

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@functools.lru_cache(maxsize=1 << 16)
def action(kind: str, microbatch: int, *, chunk: int = 0) -> Action:
    """An `Action`; equal ones are one object, since tables hold tens of thousands of them."""
    return Action(kind=kind, microbatch=microbatch, chunk=chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What each rank does, in order, and which rank holds what; a static leaf, hashable and comparable.

    A table says nothing about legality: `verify` does.

    Args:
        name: the schedule's name, or the file's.
        placement: which rank holds which virtual stage.
        rows: one tuple of actions per rank.

    Raises:
        ShardingError: the number of rows is not the placement's number of ranks.

    Example:
        >>> table = Table.parse("F0,F1,B0,B1", name="mine")
        >>> table.num_microbatches, str(table.placement)
        (2, 'loop')
    """

    name: str
    placement: Placement
    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self):
        if len(self.rows) != self.placement.num_ranks:
            raise ShardingError(
                f"schedule {self.name!r} has {len(self.rows)} rows for {self.placement.num_ranks} ranks",
                fix="give one row of actions per rank",
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks work."""
        return len(self.rows)

    @property
    def num_chunks(self) -> int:
        """How many virtual stages each rank holds."""
        return self.placement.num_chunks

    @property
    def num_microbatches(self) -> int:
        """One more than the largest microbatch any action names."""
        return 1 + max((cell.microbatch for row in self.rows for cell in row), default=-1)

    def __str__(self) -> str:
        return self._lines(" ")

    def to_csv(self) -> str:
        """One line per rank, one cell per action, after a comment line with the name and the placement."""
        return self._lines(",")

    def to_json(self) -> str:
        """The table as one JSON object: `name`, `placement` (a rank per virtual stage), `rows`."""
        rows = [[str(cell) for cell in row] for row in self.rows]
        return json.dumps({"name": self.name, "placement": list(self.placement.ranks), "rows": rows})

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """The inverse of `to_json`.

        Raises:
            ShardingError: no JSON, a missing key, a wrong type or a malformed action.
        """
        try:
            value: Any = json.loads(text)
            ranks = tuple(value["placement"])
            if not all(type(rank) is int for rank in ranks):
                raise TypeError("placement must hold whole numbers")
            rows = tuple(tuple(Action.parse(str(cell)) for cell in row) for row in value["rows"])
            return cls(name=str(value["name"]), placement=Placement(ranks=ranks), rows=rows)
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            fix = '{"name": "mine", "placement": [0, 1], "rows": [["F0", "B0"], ["F0", "B0"]]}'
            raise ShardingError(f"not a schedule in JSON: {type(error).__name__}: {error}", fix=fix) from None

    @classmethod
    def parse(cls, text: str, *, name: str = "table") -> "Table":
        """Text or CSV -> a table: one line per rank, cells separated by commas or blanks, `.` or nothing for idle.

        A first line `# schedule=zb_v placement=v` is optional; without it the placement is `loop`. Numbers of
        ranks, chunks and microbatches follow from the cells.

        Raises:
            ShardingError: a malformed cell (a caret points at it), an unknown header key, no actions at all.
        """
        header, rows = {"schedule": name, "placement": "loop"}, list[tuple[Action, ...]]()
        for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
            if line.lstrip().startswith("#"):
                header |= _parse_header(line, where=f"{name}, line {number}", known=header)
            elif line.strip(", \t"):
                rows.append(_parse_row(line, where=f"{name}, line {number}"))
        if not any(rows):
            raise ShardingError(f"{name}: no actions found", fix="one line per rank, such as F0,F1,B0,B1")
        if sum(map(len, rows)) > MAX_ACTIONS:
            raise ShardingError(f"{name}: more than {MAX_ACTIONS} actions", fix="simulate fewer microbatches")
        chunks = 1 + max(cell.chunk for row in rows for cell in row)
        placement = Placement.parse(header["placement"], stages=len(rows), chunks=chunks)
        return cls(name=header["schedule"], placement=placement, rows=tuple(rows))

    def _lines(self, separator: str) -> str:
        head = f"# schedule={self.name} placement={self.placement}\n"
        return head + "".join(separator.join(map(str, row)) + "\n" for row in self.rows)


def _parse_header(line: str, *, where: str, known: dict[str, str]) -> dict[str, str]:
    """`# schedule=NAME placement=v` -> those keys; a comment without any `=` is just a comment."""
    found = dict(word.split("=", 1) for word in line.lstrip("# \t").replace(",", " ").split() if "=" in word)
    for key in found:
        if key not in known:
            fix = f"known keys are {', '.join(known)}; write other comments without '='"
            raise ShardingError(f"{where}: unknown key {key!r}\n{caret(line, line.index(key), len(key))}", fix=fix)
    return found


def _parse_row(line: str, *, where: str) -> tuple[Action, ...]:
    row = list[Action]()
    for match in _CELL.finditer(line):
        cell = match[0]
        if cell in _IDLE:
            continue
        try:
            row.append(Action.parse(cell))
        except ShardingError as error:
            start = max(0, match.start() - 30)
            shown = line[start : match.start() + 40]
            pointer = caret(shown, match.start() - start, min(len(cell), 40))
            what, fix = str(error).split("\n  fix: ")
            raise ShardingError(f"{where}, column {match.start() + 1}: {what[:80]}\n{pointer}", fix=fix) from None
    return tuple(row)
