"""Mesh shapes as text: `"data=2,tensor=4"` <-> `MeshShape`. Imports no JAX.

In: text, a mapping or a `MeshShape`. Out: a frozen value with ordered axes, or an error with a caret.

    MeshShape.parse("data=-1,tensor=2").infer(8)    # data=4,tensor=2
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshes.errors import ShardingError, caret

STANDARD_AXES: Final = ("replica", "data", "fsdp", "expert", "context", "tensor", "stage")
"""Axis names with a fixed meaning; users may add names of their own, with their own rules."""

INFERRED: Final = -1
MAX_DEVICES: Final = 2**24
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SIZE = re.compile(r"-?[0-9]{1,9}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Ordered mesh axes with their sizes; a static leaf, comparable and hashable.

    Args:
        axes: `(name, size)` pairs, outermost (slowest network) first; one size may be -1, to be inferred.

    Raises:
        ShardingError: a malformed or repeated name, a size below 1, or a second -1.

    Example:
        >>> str(MeshShape.parse("data=2, tensor=4"))
        'data=2,tensor=4'
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self):
        text = str(self)
        if not self.axes:
            raise ShardingError("the mesh has no axes", fix='name at least one, such as "data=1"')
        position, seen, inferred = 0, set[str](), 0
        for name, size in self.axes:
            entry = f"{name}={size}"
            if not isinstance(name, str) or not _NAME.match(name):
                raise _error(text, position, len(str(name)), f"{name!r} is not an axis name", "use letters, digits, _")
            if name in seen:
                raise _error(text, position, len(name), f"axis {name!r} appears twice", "give each axis once")
            at_size = position + len(name) + 1
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != INFERRED):
                fix = f'write "{name}=1" or leave the axis out; "{name}=-1" takes the devices left over'
                raise _error(
                    text, at_size, len(str(size)), f"size {size!r} of axis {name!r} is not a positive integer", fix
                )
            inferred += size == INFERRED
            if inferred > 1:
                raise _error(text, at_size, 2, "only one axis may be -1", "give the other axes their sizes")
            seen.add(name)
            position += len(entry) + 1
        if self.num_devices > MAX_DEVICES:
            raise ShardingError(f"mesh {text} needs {self.num_devices} devices, above the limit of {MAX_DEVICES}")

    @classmethod
    def parse(cls, text: "str | MeshShape | Mapping[str, int]", /) -> "MeshShape":
        """Reads `"data=2,tensor=4"` (spaces allowed); a `MeshShape` or a mapping of sizes passes through.

        Raises:
            ShardingError: with a caret under the first wrong character.
        """
        if isinstance(text, MeshShape):
            return text
        if isinstance(text, Mapping):
            return cls(axes=tuple(text.items()))
        if not isinstance(text, str):
            raise ShardingError(f'a mesh is text such as "data=2,tensor=4", not {type(text).__name__}')
        axes: list[tuple[str, int]] = []
        position, starts = 0, list[int]()
        for entry in text.split(","):
            axes.append(_parse_entry(text, entry, position))
            starts.append(position + len(entry) - len(entry.lstrip()))
            if axes[-1][0] in [name for name, _ in axes[:-1]]:
                raise _error(
                    text, starts[-1], len(axes[-1][0]), f"axis {axes[-1][0]!r} appears twice", "give each axis once"
                )
            position += len(entry) + 1
        return cls(axes=tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in order."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """Product of the sizes that are known (an axis of -1 counts as 1)."""
        return math.prod(size for _, size in self.axes if size != INFERRED)

    def size(self, name: str) -> int:
        """Size of the axis, 1 when the mesh has no such axis."""
        return dict(self.axes).get(name, 1)

    def infer(self, num_devices: int) -> "MeshShape":
        """Replaces the -1 by what is left of `num_devices`; without a -1, returns itself.

        Raises:
            ShardingError: `num_devices` is not a multiple of the other sizes.
        """
        if INFERRED not in self.sizes:
            return self
        if num_devices % self.num_devices or num_devices < 1:
            raise ShardingError(
                f"mesh {self}: {num_devices} devices are not a multiple of the {self.num_devices} "
                "that the other axes take",
                fix="change an axis size, or give the -1 axis a size",
            )
        rest = num_devices // self.num_devices
        return MeshShape(axes=tuple((name, rest if size == INFERRED else size) for name, size in self.axes))


def _parse_entry(text: str, entry: str, position: int) -> tuple[str, int]:
    """One `name=size` at `position` of `text`."""
    lead = len(entry) - len(entry.lstrip())
    at = position + lead
    name, equals, size = entry.strip().partition("=")
    name, stripped_size = name.rstrip(), size.strip()
    if not text.strip():
        raise ShardingError("the mesh has no axes", fix='name at least one, such as "data=1"')
    if not entry.strip():
        raise _error(text, at if at < len(text) else max(0, position - 1), 1, "an axis is missing", 'write "name=size"')
    if not _NAME.match(name):
        wrong = next((i for i, c in enumerate(name) if not ((c.isalnum() and c.isascii()) or c == "_")), 0)
        raise _error(
            text, at + wrong, 1, f"{name!r} is not an axis name", "use letters, digits and _, not a digit first"
        )
    at_size = at + entry.strip().find("=") + 1 + (len(size) - len(size.lstrip()))
    if not equals:
        raise _error(text, at + len(name), 1, f"axis {name!r} has no size", f'write "{name}=2"')
    if not _SIZE.match(stripped_size):
        wrong = next((i for i, c in enumerate(stripped_size) if not (c.isdigit() and c.isascii())), 0)
        raise _error(text, at_size + wrong, 1, f"{stripped_size!r} is not a size of axis {name!r}", f'write "{name}=2"')
    value = int(stripped_size)
    if value < 1 and value != INFERRED:
        fix = f'write "{name}=1" or leave the axis out; "{name}=-1" takes the devices left over'
        raise _error(text, at_size, len(stripped_size), f"size {value} of axis {name!r} is not positive", fix)
    return name, value


def _error(text: str, position: int, length: int, what: str, fix: str) -> ShardingError:
    return ShardingError(f"mesh {text!r}: {what}\n{caret(text, position, length)}", fix=fix)
