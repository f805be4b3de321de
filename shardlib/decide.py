"""The resolver for one array: which mesh axes split each dim, and why. Pure; linen and NNX both come here.

In: logical names, sizes, rules, mesh shape. Out: one `Decision` per dim, left to right, problems included.

    decide(("embed", "mlp"), (64, 256), rules=rules, mesh=MeshShape.parse("tensor=4"))
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Final

from jax.sharding import PartitionSpec as P

from meshes.errors import nearest
from meshes.shape import MeshShape
from shardlib.rules import Rule, Rules
from shardlib.spec_axes import make_entry

Names = tuple[str | None, ...]
_BLOCKS: Final = re.compile(r"(.+)\[([0-9]+)\]\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happened to one dim and why; a static leaf.

    Args:
        dim: position of the dim.
        name: logical axis, or None for an unnamed dim.
        size: global size of the dim.
        mesh_axes: mesh axes that split it; empty when it is whole on every device.
        reason: why, in words.
        remark: what is legal and still worth a notice, or None.
        problem: what is wrong, with its fix, or None.
    """

    dim: int
    name: str | None
    size: int
    mesh_axes: tuple[str, ...] = ()
    reason: str
    remark: str | None = None
    problem: str | None = None

    @property
    def where(self) -> str:
        """`dim 1 'mlp'`."""
        return f"dim {self.dim} {self.name!r}"


def decide(names: Names, shape: tuple[int, ...], *, rules: Rules, mesh: MeshShape) -> tuple[Decision, ...]:
    """Decides every dim of one array.

    Args:
        names: logical axes, None for a dim that is never split.
        shape: global sizes, as many as names.

    Returns:
        One `Decision` per dim; a dim that cannot be placed carries its `problem`.
    """
    decisions: list[Decision] = []
    for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
        blank = Decision(dim=dim, name=name, size=size, reason="unnamed dim, never split")
        decisions.append(blank if name is None else _decide_named(blank, name, names, decisions, rules, mesh))
    return tuple(decisions)


def spec_of(decisions: tuple[Decision, ...]) -> P:
    """The decisions as a `PartitionSpec` with one entry per dim."""
    return P(*(make_entry(decision.mesh_axes) for decision in decisions))


def split_blocks(name: str) -> tuple[str, int | None]:
    """`"kv_heads[2]"` -> `("kv_heads", 2)`; a plain name counts single elements: `("mlp", None)`."""
    match = _BLOCKS.match(name)
    return (match[1], int(match[2])) if match else (name, None)


def _decide_named(
    blank: Decision, full_name: str, names: Names, earlier: list[Decision], rules: Rules, mesh: MeshShape
) -> Decision:
    name, blocks = split_blocks(full_name)
    candidates = rules.for_name(name)
    if not candidates:
        return _unknown(blank, name, rules)
    if blocks is not None and (blocks < 1 or blank.size % blocks):
        problem = f"{blank.where}: {blank.size} is not a multiple of {blocks} blocks; fix: correct the count"
        return replace(blank, reason="malformed blocks", problem=problem)
    taken_by = {axis: decision.dim for decision in earlier for axis in decision.mesh_axes}
    plain_names = {split_blocks(other)[0] for other in names if other}
    reasons: list[str] = []
    for rule in candidates:
        if rule.beside is not None and rule.beside not in plain_names:
            reasons.append(f"rule {str(rule)!r} needs a dim {rule.beside!r}")
            continue
        outcome, final = _try_rule(rule, blank, blocks or blank.size, taken_by, rules, mesh)
        reasons.append(outcome.reason)
        if final:
            return replace(outcome, reason="; ".join(reasons))
    return replace(blank, reason="; ".join(dict.fromkeys(reasons)))


def _unknown(blank: Decision, name: str, rules: Rules) -> Decision:
    known = {rule.logical for rule in rules.rules}
    reason = f"no rule for {name!r}: replicated"
    if rules.unknown == "replicate":
        return replace(
            blank, reason=reason, remark=f"{blank.where}: unknown logical axis, replicated by unknown=replicate"
        )
    problem = (
        f"dim {blank.dim}: no rule names the logical axis {name!r}{nearest(name, known)}; "
        f'fix: correct the name, or add the rule "{name} -> none"'
    )
    return replace(blank, reason=reason, problem=problem)


def _try_rule(
    rule: Rule, blank: Decision, units: int, taken_by: dict[str, int], rules: Rules, mesh: MeshShape
) -> tuple[Decision, bool]:
    """What one rule makes of the dim, and whether that is the last word."""
    if not rule.mesh_axes:
        return replace(blank, reason=f"replicated by rule {str(rule)!r}"), True
    present = tuple(axis for axis in rule.mesh_axes if mesh.size(axis) > 1)
    if not present:
        missing = [f"{axis} has size 1" if axis in mesh.names else f"no mesh axis {axis}" for axis in rule.mesh_axes]
        return replace(blank, reason=", ".join(missing)), False
    free = tuple(axis for axis in present if axis not in taken_by)
    clash = ", ".join(f"{axis} already used by dim {taken_by[axis]}" for axis in present if axis in taken_by)
    if clash and rule.taken == "error":
        problem = f"{blank.where}: {clash} (rule {str(rule)!r}); fix: drop taken=error, or name another mesh axis"
        return replace(blank, reason=clash, problem=problem), True
    if not free:
        return replace(blank, reason=clash), False
    if units % math.prod(mesh.size(axis) for axis in free):
        return _indivisible(rule, blank, units, free, rules, mesh)
    if not clash:
        return replace(blank, mesh_axes=free, reason=f"rule {str(rule)!r}"), True
    remark = f"{blank.where}: {clash}; rule {str(rule)!r} keeps {'+'.join(free)}"
    return replace(blank, mesh_axes=free, reason=f"rule {str(rule)!r}, {clash}", remark=remark), True


def _indivisible(
    rule: Rule, blank: Decision, units: int, free: tuple[str, ...], rules: Rules, mesh: MeshShape
) -> tuple[Decision, bool]:
    axes = " x ".join(f"{axis}={mesh.size(axis)}" for axis in free)
    counted = f"size {blank.size}" if units == blank.size else f"{units} blocks of {blank.size // units}"
    reason = f"{counted} not divisible by {axes}"
    policy = rule.indivisible or rules.indivisible
    if policy == "next":
        return replace(blank, reason=reason), False
    if policy == "replicate":
        reason += ": replicated by policy"
        return replace(blank, reason=reason, remark=f"{blank.where}: {reason}"), True
    if policy == "pad":
        problem = (
            f"{blank.where}: {reason}, and nothing pads it (rule {str(rule)!r}); fix: shardlib.layers.VocabEmbed and "
            f'CrossEntropyHead, which do, or write "{replace(rule, indivisible="replicate")}"'
        )
        return replace(blank, reason=reason, problem=problem), True
    problem = (
        f"{blank.where}: {reason} (rule {str(rule)!r}); fix: change a size, or write "
        f'"{replace(rule, indivisible="replicate")}"'
    )
    return replace(blank, reason=reason, problem=problem), True
