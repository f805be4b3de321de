"""How often a loop runs, from what the compiler noted or from the loop's own counter.

In: a `while` instruction and its module. Out: the count, or None when it depends on data.

    trip_count(instruction, computation=entry, module=module)    # 4
"""

import re
from dataclasses import dataclass

from shardlib.audit.hlo_text import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d{1,18})"\}', re.ASCII)
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
_SAME_VALUE = ("copy", "bitcast", "convert", "reshape")
_MAX_STEPS = 12  # instructions between a counter and the loop's root; longer chains count as unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """Element `index` of the loop's state plus `offset`; a constant where index is None."""

    index: int | None
    offset: int


def trip_count(loop: Instruction, *, computation: Computation, module: Module) -> int | None:
    """Executions of a loop's body each time the loop is reached.

    The compiler's `known_trip_count` wins. Otherwise the loop must count: its condition is `counter < constant`, its
    body adds a constant to the counter, and it starts at a constant. Anything else is None, never a guess.

    Raises:
        ShardingError: a `known_trip_count` that is not a number.
    """
    if "known_trip_count" in loop.line:
        known = _KNOWN.search(loop.line)
        if known is None:
            raise loop.error("known_trip_count is not a number")
        return int(known[1])
    condition, body = (_called(loop, key, module=module) for key in ("condition", "body"))
    bound = _bound(condition.root, computation=condition, module=module, arguments=None)
    if bound is None or bound[0].index is None or bound[0].offset != 0 or bound[1].index is not None:
        return None
    index, limit = bound[0].index, bound[1].offset
    step = _tuple_element(body.root, index, computation=body, module=module)
    start = computation.operand(loop, 0)
    first = _tuple_element(start, index, computation=computation, module=module) if start else None
    if step is None or step.index != index or step.offset < 1 or first is None or first.index is not None:
        return None
    return max(0, -(-(limit - first.offset) // step.offset))


def _called(loop: Instruction, key: str, *, module: Module) -> Computation:
    name = (loop.attribute(key) or "").lstrip("%")
    if name not in module.computations:
        raise loop.error(f"the loop has no {key} computation")
    return module.computations[name]


def _bound(
    root: Instruction, *, computation: Computation, module: Module, arguments: list[_Linear | None] | None
) -> tuple[_Linear, _Linear] | None:
    """Both sides of the `<` at the root of a condition, looking through one fusion."""
    if root.opcode == "fusion" and arguments is None:
        inner = module.computations.get((root.attribute("calls") or "").lstrip("%"))
        values = _operands(root, computation=computation, module=module, arguments=None, steps=0)
        return _bound(inner.root, computation=inner, module=module, arguments=values) if inner else None
    if root.opcode != "compare" or root.attribute("direction") != "LT" or root.attribute("type") == "TOTALORDER":
        return None
    sides = _operands(root, computation=computation, module=module, arguments=arguments, steps=0)
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return sides[0], sides[1]


def _tuple_element(state: Instruction, index: int, *, computation: Computation, module: Module) -> _Linear | None:
    """Element `index` of a tuple instruction as a linear value."""
    element = computation.operand(state, index) if state.opcode == "tuple" else None
    return _value(element, computation=computation, module=module, arguments=None, steps=0)


def _value(
    at: Instruction | None,
    *,
    computation: Computation,
    module: Module,
    arguments: list[_Linear | None] | None,
    steps: int,
) -> _Linear | None:
    """What an integer instruction computes, if that is a constant or a counter plus a constant."""
    if at is None or steps > _MAX_STEPS:
        return None
    if at.opcode == "constant":
        value = _INTEGER.fullmatch(at.literal())
        return _Linear(index=None, offset=int(value[0])) if value and at.type_text[:1] in "su" else None
    if at.opcode == "parameter":
        number = _INTEGER.fullmatch(at.literal())
        return arguments[int(number[0])] if arguments and number and 0 <= int(number[0]) < len(arguments) else None
    if at.opcode == "get-tuple-element":
        state, element = computation.operand(at, 0), _INTEGER.fullmatch(at.attribute("index") or "")
        inside_loop = arguments is None and state is not None and state.opcode == "parameter"
        return _Linear(index=int(element[0]), offset=0) if inside_loop and element else None
    if at.opcode not in (*_SAME_VALUE, "add", "fusion"):
        return None
    values = _operands(at, computation=computation, module=module, arguments=arguments, steps=steps)
    if at.opcode in _SAME_VALUE:
        return values[0] if len(values) == 1 else None
    if at.opcode == "fusion":
        inner = module.computations.get((at.attribute("calls") or "").lstrip("%"))
        if inner is None:
            return None
        return _value(inner.root, computation=inner, module=module, arguments=values, steps=steps + 1)
    if len(values) != 2 or values[0] is None or values[1] is None or None not in (values[0].index, values[1].index):
        return None
    index = values[0].index if values[0].index is not None else values[1].index
    return _Linear(index=index, offset=values[0].offset + values[1].offset)


def _operands(
    at: Instruction, *, computation: Computation, module: Module, arguments: list[_Linear | None] | None, steps: int
) -> list[_Linear | None]:
    return [
        _value(
            computation.instructions.get(name),
            computation=computation,
            module=module,
            arguments=arguments,
            steps=steps + 1,
        )
        for name in at.operands()
    ]
