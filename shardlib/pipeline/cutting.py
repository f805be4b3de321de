"""Finds the layers of a traced loss and cuts it there: `cut`.

In: a loss of one microbatch and its arguments, arrays or abstract. Out: `Parts`, or an error that lists what was found.

    parts = cut(lambda params, piece: loss(params, piece["batch"], piece["key"]), params, piece)
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from meshes.errors import ShardingError
from shardlib.annotate import BOUNDARY
from shardlib.jax_compat import constants_of, constraint_of, inputs_used, scan_signature, source_line
from shardlib.layer_scan import LayerScan, Source, equations_within, without_checkpoints
from shardlib.pipeline.parts import Leaves, Parts
from shardlib.pipeline.segments import Equations, segments_of
from shardlib.pipeline.stack import Chain, Given, Stack, Stacked, chains_of
from shardlib.programs import Program, closed_part, equation_flops, flatten, needed, subprogram
from shardlib.remat import checkpoint_names
from shardlib.tree_paths import leaves_with_paths

MARKER = "x = layer_boundary(x) before the first layer and after every layer"


def cut(loss: Callable[[Any, Any], Any], params: Any, piece: Any, *, layer_leaves: Collection[int] = ()) -> Parts:
    """Cuts a loss at its layers: markers, else the scan over parameters named "layers", else the only layer scan.

    Args:
        loss: `(params, piece)` to any pytree of arrays; traced once.
        params: a pytree of arrays or `jax.ShapeDtypeStruct`s.
        piece: what else the loss reads: a microbatch, its keys.
        layer_leaves: positions of the parameters that carry the logical axis "layers".

    Raises:
        ShardingError: no layers, several candidates, or a loss whose layers cannot be told from the rest.
    """
    closed, shape = jax.make_jaxpr(loss, return_shape=True)(params, piece)
    results = jax.tree.structure(shape)
    parts = cut_traced(closed, params, layer_leaves=layer_leaves)
    return parts if jax.tree_util.treedef_is_leaf(results) else replace(parts, results=results)


def cut_traced(closed: Any, params: Any, *, layer_leaves: Collection[int] = ()) -> Parts:
    """`cut` of a traced loss: the closed jaxpr of (params, piece)."""
    program = flatten(closed, _holds_layers)
    paths = [path for path, _ in leaves_with_paths(params)]
    stack = segments_of(program, paths) or _scan_of(program, paths, set(layer_leaves))
    return _parts(program, stack, paths)


def _holds_layers(call: Any) -> bool:
    """Whether a call may hold layers: a loop with slices and a carry, or a marker."""
    for equation in (e for jaxpr in jaxprs_in_params(call.params) for e in equations_within(jaxpr)):
        name = equation.primitive.name
        if name == "name" and equation.params["name"] == BOUNDARY:
            return True
        if name == "scan" and 0 < sum(scan_signature(equation)) < len(equation.invars):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    scan: LayerScan
    index: int
    leaves: tuple[int, ...]

    def described(self, paths: list[str]) -> str:
        shown = ", ".join(paths[leaf] for leaf in self.leaves[:3]) + (", ..." if len(self.leaves) > 3 else "")
        return (
            f"a scan of {self.scan.length} steps over {shown or 'values made from parameters'}{_at(self.scan.equation)}"
        )


def _scan_of(program: Program, paths: list[str], layer_leaves: set[int]) -> Stack:
    """The layer scan as a `Stack`."""
    candidates = _candidates(program, len(paths))
    named = [c for c in candidates if c.leaves and set(c.leaves) <= layer_leaves]
    chosen = named or candidates
    if len(chosen) > 1:
        listed = "\n".join(f"- {candidate.described(paths)}" for candidate in chosen)
        raise ShardingError(
            f"the loss has {len(chosen)} stacks of layers, and a pipeline stages one:\n{listed}",
            fix=f"run them as one scan, or mark the layers to stage: {MARKER} (the other stack then runs before or "
            "after the layers, on the first or the last stage)",
        )
    if not chosen:
        raise _no_layers(program, paths)
    (candidate,) = chosen
    equation = candidate.scan.equation
    if equation.params["reverse"]:
        raise ShardingError(
            f"the layers run in reverse: {candidate.described(paths)}",
            fix="scan forwards over parameters stacked in the order in which they run",
        )
    return _stack_of(program, candidate, paths)


def _candidates(program: Program, num_params: int) -> list[_Candidate]:
    known: dict[Any, Source] = {
        var: Source.PARAMS if position < num_params else Source.BATCH for position, var in enumerate(program.inputs)
    }
    leaf_of = {var: position for position, var in enumerate(program.inputs[:num_params])}
    found = []
    for index, equation in enumerate(program.equations):
        given = [Source.NEITHER if isinstance(a, Literal) else known.get(a, Source.NEITHER) for a in equation.invars]
        union = Source.NEITHER
        for source in given:
            union |= source
        if equation.primitive.name == "scan":
            num_consts, num_carry = scan_signature(equation)
            initial = tuple(given[num_consts : num_consts + num_carry])
            scan = LayerScan(equation=equation, inputs=tuple(given), initial=initial)
            if scan.runs_layers:
                stacked = chains_of(program, program.equations[:index], leaf_of, num_layers=scan.length)
                sliced = equation.invars[num_consts + num_carry :]
                leaves = {s.leaves[0] for var in sliced if var in stacked for s in stacked[var].stacked}
                found.append(_Candidate(scan=scan, index=index, leaves=tuple(sorted(leaves))))
        known.update(dict.fromkeys(equation.outvars, union))
    return found


def _stack_of(program: Program, candidate: _Candidate, paths: list[str]) -> Stack:
    equation, index = candidate.scan.equation, candidate.index
    num_consts, num_carry = scan_signature(equation)
    leaf_of = {var: position for position, var in enumerate(program.inputs[: len(paths)])}
    chains = chains_of(program, program.equations[:index], leaf_of, num_layers=candidate.scan.length)
    sliced = equation.invars[num_consts + num_carry :]
    for var, source in zip(sliced, candidate.scan.inputs[num_consts + num_carry :]):
        if source == Source.PARAMS and var not in chains:
            _, read = needed(program.equations[:index], [var])
            of = ", ".join(paths[leaf_of[v]] for v in program.inputs[: len(paths)] if v in read)
            raise ShardingError(
                f"the layers slice a value made from the parameters {of} by more than a cast or a product with a "
                f"scalar{_at(equation)}, so a stage cannot make its own part of it",
                fix="stack the parameters as the scan takes them, and do the rest inside the layer",
            )
    body = without_checkpoints(candidate.scan.body)
    inside = Program(
        like=body,
        equations=tuple(body.eqns),
        inputs=tuple(body.invars),
        outputs=tuple(body.outvars),
        constants=constants_of(equation.params["jaxpr"]),
    )
    return Stack(
        num_layers=candidate.scan.length,
        before=program.equations[:index],
        after=program.equations[index + 1 :],
        consts=tuple(equation.invars[:num_consts]),
        initial=tuple(equation.invars[num_consts : num_consts + num_carry]),
        sliced=tuple(chains[var] if var in chains else Given(variables=(var,)) for var in sliced),
        body=inside,
        final=tuple(equation.outvars[:num_carry]),
        outputs=tuple(Given(variables=(var,)) for var in equation.outvars[num_carry:]),
        where=candidate.described(paths),
    )


def _no_layers(program: Program, paths: list[str]) -> ShardingError:
    loops = [e for e in equations_within(Equations(program.equations)) if e.primitive.name in ("scan", "while")]
    described = [
        f"- a scan of {e.params['length']} steps{_at(e)}" if e.primitive.name == "scan" else f"- a while loop{_at(e)}"
        for e in loops[:8]
    ]
    found = "\n".join(described) or "- no loop at all: layers written one after another need markers"
    return ShardingError(
        f"the loss has no layers to stage: no top-level scan over stacked parameters that carries activations. "
        f"Found:\n{found}",
        fix=f"put the layers under nn.scan, nnx.scan or lax.scan; or mark them in the model: {MARKER}",
    )


def _at(equation: Any) -> str:
    line = source_line(equation)
    return f" ({line})" if line else ""


def _parts(program: Program, stack: Stack, paths: list[str]) -> Parts:
    params, piece = program.inputs[: len(paths)], program.inputs[len(paths) :]
    stacked = _stacked_of(stack, paths)
    inside = {leaf for kind in stacked for leaf in kind.leaves}
    outer = [leaf for leaf in range(len(params)) if leaf not in inside]
    given = [*(params[leaf] for leaf in outer), *piece]
    flow = _Flow.of(stack)
    # A carry that no layer changes is, after the layers, what it was before them.
    same = {stack.final[position]: stack.initial[position] for position in flow.constant}
    rest = [_with_inputs(equation, same) for equation in (*stack.before, *stack.after)]
    results = [_renamed(atom, same) for atom in program.outputs]
    _, read = needed(rest, results)
    outputs = [position for position, made in enumerate(stack.outputs) if any(var in read for var in made.variables)]
    carried = [*(stack.initial[i] for i in flow.varying), *(stack.consts[i] for i in flow.promoted)]
    shared = [*(stack.consts[i] for i in flow.consts), *(stack.initial[i] for i in flow.constant)]
    own = [kind.variables for kind in stack.sliced if isinstance(kind, Given)]
    side_outputs = [*shared, *itertools.chain(*own)]
    _check_outside(rest, {params[leaf]: paths[leaf] for leaf in inside}, [*results, *carried, *side_outputs], stack)

    pre = subprogram(program, stack.before, inputs=given, outputs=carried)
    side = subprogram(program, stack.before, inputs=given, outputs=side_outputs)
    final = [stack.final[i] for i in flow.varying]
    made = [stack.outputs[position].variables for position in outputs]
    post = subprogram(program, rest, inputs=[*given, *final, *itertools.chain(*made)], outputs=results)
    counts = [len(variables) for variables in own]

    def split_side(outer: Leaves, piece: Leaves) -> tuple[Leaves, Leaves]:
        values = side(*outer, *piece)
        return values[: len(shared)], _stacks(values[len(shared) :], counts)

    def run_post(outer: Leaves, piece: Leaves, carry: Leaves, stacks: Leaves) -> Leaves:
        values = [value for array, variables in zip(stacks, made) for value in _values(array, len(variables))]
        return post(*outer, *piece, *carry[: len(final)], *values)

    flops = lambda equations, outs: sum(map(equation_flops, needed(equations, outs)[0]))  # noqa: E731

    def reads(equations: Iterable[Any], outs: Sequence[Any], *more: Any) -> tuple[int, ...]:
        """Positions in a piece of what these depend on."""
        closed = closed_part(program, equations, inputs=[*given, *more], outputs=outs)
        used = inputs_used(closed, [True] * len(outs))
        return tuple(position for position in range(len(piece)) if used[len(outer) + position])

    return Parts(
        num_layers=stack.num_layers,
        stacked=tuple(stacked),
        outer=tuple(outer),
        pre=lambda outer, piece: pre(*outer, *piece),
        side=split_side,
        block=_block_of(stack, flow, stacked, outputs),
        post=run_post,
        carry=tuple(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in carried),
        outputs=tuple(_stack_shape(variables, stack.num_layers) for variables in made),
        carry_specs=_carry_specs(stack, flow, carried),
        reads_pre=reads(stack.before, carried),
        reads_side=reads(stack.before, side_outputs),
        reads_post=reads(rest, results, *final, *itertools.chain(*made)),
        read_again=lambda chosen: _read_again(pre, _abstract(given[: len(outer)]), _abstract(piece), chosen),
        names=checkpoint_names(Equations(stack.body.equations)),
        where=stack.where,
        flops=(
            flops(stack.before, carried),
            sum(map(equation_flops, stack.body.equations)),
            flops(rest, results),
            flops(stack.before, side_outputs),
        ),
    )


def _abstract(variables: Sequence[Any]) -> Leaves:
    return [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables]


def _read_again(pre: Callable[..., Leaves], outer: Leaves, piece: Leaves, chosen: Sequence[bool]) -> tuple[int, ...]:
    """What the gradients of the chosen parameters read of a piece where they pass through `pre`."""

    def gradients(piece: Leaves, outer: Leaves, cotangents: Leaves) -> Leaves:
        some = [leaf for leaf, wanted in zip(outer, chosen, strict=True) if wanted]

        def carry(some: Leaves) -> Leaves:
            new = iter(some)
            made = pre(*(next(new) if wanted else leaf for leaf, wanted in zip(outer, chosen)), *piece)
            return [leaf for leaf in made if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        return jax.vjp(carry, some)[1](cotangents)[0]

    made = jax.eval_shape(pre, *outer, *piece)
    cotangents = [leaf for leaf in made if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    closed = jax.make_jaxpr(gradients)(piece, outer, cotangents)
    used = inputs_used(closed, [True] * len(closed.out_avals))
    return tuple(position for position in range(len(piece)) if used[position])


def _carry_specs(stack: Stack, flow: "_Flow", carried: list[Any]) -> tuple[P, ...]:
    """Where the model places each carry: as the layer leaves it, else as the layers get it."""
    inside, before = stack.body.equations, stack.before
    left = [_constraint(stack.body.outputs[position], inside) for position in flow.varying]
    left += [None] * (len(carried) - len(left))
    found = [a or _constraint(atom, before) or P() for a, atom in zip(left, carried, strict=True)]
    return tuple(P(*(None if entry is P.UNCONSTRAINED else entry for entry in spec)) for spec in found)


def _constraint(atom: Any, equations: Iterable[Any]) -> P | None:
    """The constraint that a value was placed by, looking through names and casts."""
    made = {var: equation for equation in equations for var in equation.outvars}
    while not isinstance(atom, Literal) and atom in made:
        equation = made[atom]
        spec = constraint_of(equation)
        if spec is not None or equation.primitive.name not in ("name", "convert_element_type", "copy"):
            return spec
        atom = equation.invars[0]
    return None


def _stacks(values: list[Any], counts: list[int]) -> list[Any]:
    """Consecutive values as arrays over layers: one value is such an array, several are its slices."""
    left = iter(values)
    groups = [[next(left) for _ in range(count)] for count in counts]
    return [group[0] if len(group) == 1 else jnp.stack(group) for group in groups]


def _values(array: Any, count: int) -> list[Any]:
    return [array] if count == 1 else [array[layer] for layer in range(count)]


def _stack_shape(variables: tuple[Any, ...], num_layers: int) -> jax.ShapeDtypeStruct:
    aval = variables[0].aval
    shape = aval.shape if len(variables) == 1 else (num_layers, *aval.shape)
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _stacked_of(stack: Stack, paths: list[str]) -> list[Stacked]:
    """The parameters of the layers, each once."""
    kinds = dict.fromkeys(s for chain in stack.sliced if isinstance(chain, Chain) for s in chain.stacked)
    leaves = [leaf for kind in kinds for leaf in kind.leaves]
    twice = {paths[leaf] for leaf in leaves if leaves.count(leaf) > 1}
    if twice:
        raise ShardingError(
            f"the layers slice {', '.join(sorted(twice))} along two dims ({stack.where})",
            fix="give the layers one array per dim that they slice",
        )
    return sorted(kinds, key=lambda kind: kind.leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """How values pass the layers, by position: carries that change and that do not; constants that stay and travel.

    A carry that no layer changes is a side input. A constant whose computation holds products travels with the carry
    instead, unchanged: otherwise every stage would compute it again.
    """

    varying: list[int]
    constant: list[int]
    consts: list[int]
    promoted: list[int]

    @classmethod
    def of(cls, stack: Stack) -> "_Flow":
        def dear(atom: Any) -> bool:
            kept, _ = needed(stack.before, [atom])
            return not isinstance(atom, Literal) and any(map(equation_flops, kept))

        num_consts, num_carry = len(stack.consts), len(stack.initial)
        body = stack.body
        same = [body.outputs[i] is body.inputs[num_consts + i] for i in range(num_carry)]
        constant = [i for i in range(num_carry) if same[i] and not dear(stack.initial[i])]
        promoted = [i for i in range(num_consts) if dear(stack.consts[i])]
        return cls(
            varying=[i for i in range(num_carry) if i not in constant],
            constant=constant,
            consts=[i for i in range(num_consts) if i not in promoted],
            promoted=promoted,
        )


def _block_of(stack: Stack, flow: _Flow, stacked: list[Stacked], outputs: list[int]) -> Callable[..., Any]:
    run = subprogram(stack.body, stack.body.equations, inputs=stack.body.inputs, outputs=stack.body.outputs)
    num_consts, num_carry = len(stack.consts), len(stack.initial)
    num_kept, num_varying = len(flow.consts), len(flow.varying)

    def block(layer: Leaves, side: Leaves, carry: Leaves, slices: Leaves) -> tuple[Leaves, Leaves]:
        own, rest = dict(zip(stacked, layer, strict=True)), iter(slices)
        consts, init = [None] * num_consts, [None] * num_carry
        for position, value in zip(flow.consts, side[:num_kept], strict=True):
            consts[position] = value
        for position, value in zip(flow.promoted, carry[num_varying:], strict=True):
            consts[position] = value
        for position, value in zip(flow.constant, side[num_kept:], strict=True):
            init[position] = value
        for position, value in zip(flow.varying, carry[:num_varying], strict=True):
            init[position] = value
        sliced = [
            kind.run(*(own[s] for s in kind.stacked)) if isinstance(kind, Chain) else next(rest)
            for kind in stack.sliced
        ]
        made = run(*consts, *init, *sliced)
        passed = [made[position] for position in flow.varying] + list(carry[num_varying:])
        return passed, [made[num_carry + position] for position in outputs]

    return block


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _with_inputs(equation: Any, names: dict[Any, Any]) -> Any:
    if not any(not isinstance(atom, Literal) and atom in names for atom in equation.invars):
        return equation
    return equation.replace(invars=[_renamed(atom, names) for atom in equation.invars])


def _check_outside(rest: list[Any], stacked: dict[Any, str], outputs: list[Any], stack: Stack) -> None:
    """Raises for a layer's parameter that something outside the layers reads: it lives on one stage only."""
    kept, read = needed(rest, outputs)
    for var, path in stacked.items():
        if var in read:
            where = next((_at(e) for e in kept if any(atom is var for atom in e.invars)), "")
            raise ShardingError(
                f"{path} belongs to the layers ({stack.where}) and is also read outside of them{where}: a stage holds "
                "its own layers only",
                fix="use it inside the layer (a penalty per layer can be an output of the scan), or leave it to the "
                "optimizer (weight decay)",
            )
