"""Every use of private JAX, each with the version it was seen in and the public API that would replace it.

In: values of public JAX. Out: what only private modules tell.

    used = inputs_used(closed_jaxpr, [False, True])
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

# Seen in JAX 0.10.2 and 0.12.0: the dead-code pass that jax.checkpoint and jax.linearize use. There is no public
# way to ask which inputs an output depends on through nested jit, scan and cond; a public one would replace it.
from jax._src.interpreters.partial_eval import dce_jaxpr, partial_eval_jaxpr_nounits

# Seen in 0.10.2 and 0.12.0: the frames of the user's files that made an equation. `jax.extend` does not tell.
from jax._src.source_info_util import user_frames
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun, jaxprs_in_params


def inputs_used(closed_jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """For every input of the jaxpr, whether one of the chosen outputs depends on it."""
    _, used = dce_jaxpr(closed_jaxpr.jaxpr, list(outputs))
    return list(used)


def alive(closed: Any) -> Any:
    """The open jaxpr without equations that no output needs."""
    return dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0]


def pruned(closed: Any, outputs: Sequence[bool], *, num_unused: int) -> Callable[..., Any]:
    """Chosen outputs of a traced function, by the equations they need alone.

    Args:
        closed: its closed jaxpr.
        outputs: for every output, whether it is wanted.
        num_unused: how many inputs, the first ones, they must not use.

    Returns:
        From the other inputs to the wanted outputs, flat.

    Raises:
        ValueError: an output depends on one of the first inputs.
    """
    jaxpr, used = dce_jaxpr(closed.jaxpr, list(outputs))
    if any(used[:num_unused]):
        raise ValueError("an output depends on an argument that is to be pruned away")
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    return lambda *given: run(*(x for x, is_used in zip(given, used[num_unused:], strict=True) if is_used))


def known_part(
    closed: Any, unknown: Sequence[bool], outputs: Sequence[int], *, allow: Callable[[Any], bool] = lambda jaxpr: True
) -> tuple[list[bool], Callable[..., Any]]:
    """Which outputs follow from the known inputs alone, and a function from those inputs to them.

    Seen in 0.10.2 and 0.12.0: the split into a known and an unknown program that `jax.checkpoint` differentiates by; it
    goes into loops and branches. A public partial evaluation of jaxprs would replace it.

    Args:
        closed: a closed jaxpr.
        unknown: for every input, whether it is unknown.
        outputs: positions of the outputs asked for.
        allow: from the jaxpr that makes one output to whether to count it as known.

    Returns:
        For every output asked for, whether it is known; and known inputs -> the known ones among them, in order.
    """
    known, _, is_unknown, _ = partial_eval_jaxpr_nounits(closed, list(unknown), instantiate=False)
    positions = [i for i, hidden in enumerate(is_unknown) if not hidden]
    num_made = len(opened(known).outvars)

    def making(chosen: Sequence[int]) -> tuple[Any, list[bool]]:
        places = {positions.index(i) for i in chosen}
        return dce_jaxpr(opened(known), [place in places for place in range(num_made)])

    is_known = [not is_unknown[i] and allow(making([i])[0]) for i in outputs]
    chosen = sorted(i for i, wanted in zip(outputs, is_known) if wanted)
    jaxpr, used = making(chosen)
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, known.consts))

    def call(*inputs: Any) -> Any:
        return run(*(value for value, is_used in zip(inputs, used, strict=True) if is_used))

    return is_known, call


def opened(jaxpr: Any) -> Any:
    """The jaxpr itself of an open or closed one; 0.12 has one type for both, with `.jaxpr` the identity on it."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def constants_of(jaxpr: Any) -> dict[Any, Any]:
    """The constants of a closed jaxpr by the variables that stand for them; none for an open one.

    0.10 keeps them beside the jaxpr in a ClosedJaxpr, 0.12 in the jaxpr itself.
    """
    values = getattr(jaxpr, "consts", ())
    return dict(zip(opened(jaxpr).constvars, values, strict=True)) if values else {}


def with_jaxpr(original: Any, jaxpr: Any) -> Any:
    """`jaxpr`, open or closed as `original` is and with its constants, so that it fits in the same place."""
    return original.replace(jaxpr=jaxpr) if isinstance(original, ClosedJaxpr) else jaxpr


# Equations that run one jaxpr on all their inputs, by the parameter that holds it: names of 0.10.2 and 0.12.0. Public
# is `jax.extend.core.jaxprs_in_params`, which does not say which input goes where.
_CALLS = {"jit": "jaxpr", "shard_map": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def called(equation: Any) -> str | None:
    """The parameter that holds the one jaxpr an equation runs on all its inputs, or None for any other equation."""
    return "jaxpr" if is_checkpoint(equation) else _CALLS.get(equation.primitive.name)


def held_jaxprs(equation: Any) -> list[tuple[str, Any]]:
    """The parameters of an equation that hold a jaxpr, or a tuple of them, by name."""
    is_jaxpr = lambda value: isinstance(value, ClosedJaxpr | Jaxpr)  # noqa: E731
    return [
        (name, value)
        for name, value in equation.params.items()
        if is_jaxpr(value) or (isinstance(value, tuple | list) and value and all(map(is_jaxpr, value)))
    ]


def is_checkpoint(equation: Any) -> bool:
    """Whether the equation is a `jax.checkpoint`."""
    return equation.primitive is _checkpoint_primitive()


def scan_signature(equation: Any) -> tuple[int, int]:
    """How many of a scan equation's inputs are constants and carries; the rest are sliced.

    Seen: parameters `num_consts` and `num_carry` in 0.10.2, `ft_in` in 0.12.0. `jax.extend` has neither.
    """
    if "num_consts" in equation.params:
        return equation.params["num_consts"], equation.params["num_carry"]
    consts, carry, _ = equation.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def checkpointed(jaxpr: Any, *, policy: Callable[..., Any], prevent_cse: bool) -> Any:
    """An open jaxpr with the same constants, inputs and outputs, whose equations are all in one `jax.checkpoint`."""
    like = _checkpoint_like(policy, prevent_cse)
    constants, inputs = [Var(var.aval) for var in jaxpr.constvars], [Var(var.aval) for var in jaxpr.invars]
    outputs = [Var(atom.aval) for atom in jaxpr.outvars]
    inner = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    body = like.replace(
        invars=[*constants, *inputs],
        outvars=outputs,
        params={**like.params, "jaxpr": inner},
        effects=jaxpr.effects,
        source_info=like.source_info.replace(name_stack=type(like.source_info.name_stack)()),
    )
    return jaxpr.replace(constvars=constants, invars=inputs, outvars=outputs, eqns=[body])


@functools.cache
def _checkpoint_primitive() -> Any:
    return _checkpoint_like(jax.checkpoint_policies.nothing_saveable, True).primitive


def _checkpoint_like(policy: Callable[..., Any], prevent_cse: bool) -> Any:
    """A checkpoint equation made by JAX itself, to take the primitive and its parameters from."""
    identity = jax.checkpoint(lambda x: x, policy=policy, prevent_cse=prevent_cse)
    return jax.make_jaxpr(identity)(0.0).jaxpr.eqns[-1]


def renamed(equation: Any, read: Callable[[Any], Any], *, outputs: Sequence[Any], caller: Any = None) -> Any:
    """The equation with `read` of its inputs and new outputs; inside `caller`'s scope of names when inlined from it.

    `source_info.name_stack` is relative to the enclosing jaxpr in 0.10.2 and 0.12.0; no public API joins two.
    """
    source = equation.source_info
    if caller is not None:
        source = source.replace(name_stack=caller.source_info.name_stack + source.name_stack)
    return equation.replace(invars=[read(atom) for atom in equation.invars], outvars=outputs, source_info=source)


def in_device_memory(value: Any) -> bool:
    """Whether an abstract value is in device memory, not offloaded to the host.

    Seen: `memory_space` of abstract values in 0.10.2 and 0.12.0; `jax.ShapeDtypeStruct` has none.
    """
    return getattr(value, "memory_space", jax.memory.Space.Device) != jax.memory.Space.Host


def constraint_of(equation: Any) -> Any:
    """The spec of a `with_sharding_constraint` equation; None for any other equation.

    Seen: parameter `sharding` in 0.10.2 and 0.12.0. `jax.extend` has no reading of a constraint.
    """
    if equation.primitive.name != "sharding_constraint":
        return None
    return getattr(equation.params["sharding"], "spec", None)


_NOT_THE_MODEL = (f"{os.sep}flax{os.sep}", f"shardlib{os.sep}annotate.py")


def source_line(equation: Any) -> str:
    """The user's file and line that made an equation, or "" where JAX kept none."""
    for frame in user_frames(equation.source_info.traceback):
        if not any(part in frame.file_name for part in _NOT_THE_MODEL):
            path = os.path.relpath(frame.file_name)
            return f"{frame.file_name if path.startswith('..') else path}:{frame.start_line}"
    return ""


def scope_and_line(equation: Any) -> tuple[str, str]:
    """Names of the modules around an equation, relative to the enclosing jaxpr, and the user's file and line.

    Seen: `source_info.name_stack` in 0.10.2 and 0.12.0. `jax.extend` has no reading of it.
    """
    return str(equation.source_info.name_stack), source_line(equation)


def manual_axes(jaxpr: Any) -> set[str]:
    """Mesh axes that a program, or a program nested in it, is manual over.

    Seen: parameter `newly_manual_axes` of shard_map in 0.10.2 and 0.12.0. `jax.extend` has no reading of a shard_map.
    """
    found: set[str] = set()
    for equation in opened(jaxpr).eqns:
        if equation.primitive.name == "shard_map":
            found |= set(equation.params["newly_manual_axes"])
        for inner in jaxprs_in_params(equation.params):
            found |= manual_axes(inner)
    return found


def splash_gradients(
    kernel: Any, query: Any, key: Any, value: Any, segment_ids: Any, out: Any, log_weight: Any, cotangent: Any
) -> tuple[Any, Any, Any]:
    """Gradients of queries, keys and values where the softmax runs over more keys than the kernel was given.

    Seen in 0.10.2 and 0.12.0: the rule by which a splash attention kernel is differentiated, which takes the result and
    the log of the denominator from outside. The public kernel knows those of its own keys only; a public gradient
    that takes them would replace it.

    Args:
        kernel: from `make_splash_mha_single_device`, without residuals.
        query, key, value, segment_ids: what the kernel takes.
        out, log_weight: over all keys, [heads, length, head_dim] and [heads, length].
        cotangent: of `out`.
    """
    options = kernel.kwargs
    names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function")
    static: Any = [options[name] for name in (*names, "attn_logits_soft_cap", "interpret")]
    known = (query, key, value, segment_ids, None, out, log_weight, kernel.dq_mask_info, kernel.dkv_mask_info)
    backward: Any = splash_attention_kernel._splash_attention_bwd
    found = backward(False, *static, known, cotangent)
    return found[3], found[4], found[5]
