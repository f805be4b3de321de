"""What a layer stores for the backward pass: one policy for every layer of an unmodified loss.

In: a loss with its layers under a scan (linen, NNX or `lax.scan`) and a policy, as text `full`, `none`, `dots`,
`dots_no_batch`, `names:a,b` or `offload:a,b`. Out: the same loss with that policy in place of the model's own remat.

    loss = with_policy(loss, parse_policy("names:attention_out,mlp_hidden"))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from meshes.errors import ShardingError, caret, nearest, raise_collected
from shardlib.jax_compat import checkpointed, is_checkpoint
from shardlib.layer_scan import LayerScan, equations_within, layer_scans, rewrite, sources, without_checkpoints

PLAIN = ("full", "none", "dots", "dots_no_batch")
NAMED = ("names", "offload")
HOST = "pinned_host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What each layer stores between its forward and its backward pass; a static leaf.

    Args:
        kind: `full` stores the layer's inputs and recomputes all else; `none` stores whatever the backward pass reads;
            `dots` stores the results of products, `dots_no_batch` of those without batch dims (not attention's);
            `names` stores the values marked by `checkpoint_name` with one of the names; `offload` keeps those in
            host memory.
        names: for `names` and `offload`, at least one; else none.
    """

    kind: str
    names: tuple[str, ...] = ()

    def __post_init__(self):
        if self.kind not in PLAIN + NAMED:
            raise ShardingError(
                f"remat policy {self.kind!r} is unknown{nearest(self.kind, PLAIN + NAMED)}",
                fix=f"use one of {', '.join(PLAIN)}, names:NAME,NAME or offload:NAME,NAME",
            )
        if self.kind in PLAIN and self.names:
            raise ShardingError(
                f"remat policy {self.kind!r} takes no names, but got {', '.join(self.names)}",
                fix=f"write {self.kind!r}, or 'names:{','.join(self.names)}'",
            )
        if self.kind in NAMED and not self.names:
            raise ShardingError(
                f"remat policy {self.kind!r} needs the names of what to store",
                fix=f"write '{self.kind}:attention_out,mlp_hidden' with names given to `checkpoint_name`, or 'full'",
            )
        # A set in meaning: sorted and without repeats, so that equal policies compare equal.
        object.__setattr__(self, "names", tuple(sorted(set(self.names))))

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(self.names)}" if self.names else self.kind

    def saveable(self) -> Callable[..., Any]:
        """The policy as `jax.checkpoint` takes it; `none` has no such form."""
        policies = jax.checkpoint_policies
        match self.kind:
            case "full":
                return policies.nothing_saveable
            case "dots":
                return policies.dots_saveable
            case "dots_no_batch":
                return policies.dots_with_no_batch_dims_saveable
            case "names":
                return policies.save_only_these_names(*self.names)
        assert self.kind == "offload", self.kind
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(self.names),
            offload_src="device",
            offload_dst=HOST,
        )


def parse_policy(text: "str | Policy", /) -> Policy:
    """Reads the text form; `parse_policy(str(policy)) == policy`. A policy is returned as it is.

    Raises:
        ShardingError: an unknown kind, with the nearest; names missing, empty or where there are none.

    Example:
        >>> parse_policy("names:mlp_hidden, attention_out").names
        ('attention_out', 'mlp_hidden')
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise ShardingError(
            f"a remat policy is text, not {type(text).__name__}", fix=f"use one of {', '.join(PLAIN + NAMED)}"
        )
    kind, colon, listed = text.partition(":")
    parts = listed.split(",") if listed.strip() else []
    names = [part.strip() for part in parts]
    if "" in names:
        position = len(kind) + 1 + sum(len(part) + 1 for part in parts[: names.index("")])
        raise ShardingError(f"remat policy: an empty name\n{caret(text, position)}", fix="remove the extra comma")
    if colon and not names and kind.strip() in PLAIN:
        raise ShardingError(f"remat policy: nothing after the colon\n{caret(text, len(kind))}", fix="remove the colon")
    return Policy(kind=kind.strip(), names=tuple(names))


def with_policy(loss: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """The loss with every layer under exactly one `jax.checkpoint`, or none for `none`; same values and gradients.

    The layers are found in the traced program: scans over stacked parameters that carry activations. The model's own
    `jax.checkpoint`s in the layer's body and around the scan are dropped; those in loops inside a layer stay.

    Args:
        loss: `(params, batch, rng[, state])` to any pytree of arrays.
        policy: what layers store.

    Returns:
        A function of the same arguments; it raises a `ShardingError` when it is traced on a loss without layers, with
        a name that no layer has, or whose dropout draws from a generator that cannot be recomputed.
    """

    def remade(params: Any, batch: Any, *rest: Any) -> Any:
        closed, shape = jax.make_jaxpr(loss, return_shape=True)(params, batch, *rest)
        made_from = sources(params, batch, *rest)
        _check(policy, closed, layer_scans(closed, made_from))
        closed = rewrite(closed, made_from, lambda scan: _apply(policy, scan))
        outputs = jaxpr_as_fun(closed)(*jax.tree.leaves((params, batch, *rest)))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return remade


def checkpoint_names(jaxpr: Any) -> tuple[str, ...]:
    """The names given by `checkpoint_name` anywhere in a jaxpr, sorted."""
    found = {equation.params["name"] for equation in equations_within(jaxpr) if equation.primitive.name == "name"}
    return tuple(sorted(found))


def _apply(policy: Policy, scan: LayerScan) -> Any:
    body = without_checkpoints(scan.body)
    if policy.kind == "none":
        return scan.with_body(body)
    # A loop keeps the compiler from merging forward and recomputation; one that is unrolled does not.
    unrolled = scan.length == 1 or scan.equation.params["unroll"] > 1
    return scan.with_body(checkpointed(body, policy=policy.saveable(), prevent_cse=unrolled))


def _check(policy: Policy, closed: Any, layers: list[LayerScan]) -> None:
    if not layers:
        if policy.kind == "none" and not any(is_checkpoint(equation) for equation in equations_within(closed)):
            return
        loops = [equation for equation in equations_within(closed) if equation.primitive.name in ("scan", "while")]
        found = ", ".join(_loop(equation) for equation in loops) or "no loop at all"
        raise ShardingError(
            f"remat policy '{policy}': the loss has no layers, that is no scan over stacked parameters that carries "
            f"activations; found {found}",
            fix="run the layers under nn.scan, nnx.scan or lax.scan with their parameters stacked, or leave remat out "
            "of the plan and write jax.checkpoint in the model",
        )
    if policy.kind == "none":
        return
    known = sorted({name for scan in layers for name in checkpoint_names(scan.body)})
    listed = f"names in the layers: {', '.join(known) or 'none'}"
    elsewhere = set(checkpoint_names(closed)) - set(known)
    raise_collected(
        [
            f"no layer names a value {name!r}"
            + (", only other parts of the loss do" if name in elsewhere else nearest(name, known))
            for name in policy.names
            if name not in known
        ],
        heading=f"remat policy '{policy}': {listed}; fix: choose of these, or mark the value in the layer with "
        'checkpoint_name(x, "NAME"):',
    )
    if any(_draws_unsafely(scan.body) for scan in layers):
        raise ShardingError(
            f"remat policy '{policy}': the layers draw random bits from the generator unsafe_rbg, whose bits may "
            "depend on how the program is partitioned: recomputed dropout masks could differ from the first ones",
            fix='make the key with jax.random.key(seed, impl="threefry2x32"), or use the policy none',
        )


def _loop(equation: Any) -> str:
    length = equation.params.get("length")
    return "a while loop" if length is None else f"a scan of {length} steps"


def _draws_unsafely(body: Any) -> bool:
    variables = (atom for equation in equations_within(body) for atom in (*equation.invars, *equation.outvars))
    return any(str(getattr(atom.aval, "dtype", "")) == "key<urbg>" for atom in variables)
