"""A vocabulary spread over pipeline stages: no stage computes the head alone, and no device gathers the table.

In: a loss whose embedding and head are `shardlib.layers` or call the slots `embed_tokens` and `token_losses`. Out: the
parameters that stay in parts over `stage`, and what is in force while such a loss is traced.

    spread = spread_leaves(closed, paths, vocab_dims, sizes=sizes, parts=4)    # position -> dim of the vocabulary
    loss = annotate.under(with_spread_slots(in_force, stage="stage", parts=4), loss)

Source: Yeung et al. 2024 (2411.05288), in whose method the output layer is computed by all stages together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from meshes.errors import ShardingError, raise_collected
from shardlib.annotate import EMBED_TOKENS, TOKEN_LOSSES, VOCAB_PARTS, Active
from shardlib.jax_compat import called, opened, source_line
from shardlib.ops.vocab_embedding import embed_tokens
from shardlib.ops.vocab_loss import TokenLosses, token_losses
from shardlib.ops.vocab_shards import VOCAB_AXES

VOCAB: Final = "vocab"
MARK: Final = "shardlib_spread_vocabulary"
_PASSES: Final = ("convert_element_type", "copy", "sharding_constraint", "transpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadCall:
    """One lookup or one loss of a spread vocabulary; a static leaf.

    Args:
        tokens: of one microbatch of one data shard.
        embed: the size of a token's vector.
        statistics: scalars per token that a loss exchanges; 0 for a lookup.
    """

    tokens: int
    embed: int
    statistics: int


def with_spread_slots(
    in_force: Active, *, stage: str, parts: int, record: Callable[[SpreadCall], None] = lambda call: None
) -> Active:
    """What is in force with the slots of a vocabulary that is split over stages first.

    Args:
        in_force: all else.
        stage: the mesh axis.
        parts: into how many parts the arrays at hand are already divided: 1 outside of the region of the ticks.
        record: hears every call.
    """
    axes = (stage, *VOCAB_AXES)

    def lookup(table: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
        record(SpreadCall(tokens=ids.size, embed=table.shape[1], statistics=0))
        return embed_tokens(checkpoint_name(table, MARK), ids, **{**options, "axes": axes})

    def losses(x: jax.Array, head: jax.Array, targets: jax.Array, **options: Any) -> TokenLosses:
        # The largest logit, the sum of exponentials, the target's logit; for smoothing the sum of all.
        statistics = 4 if options.get("smoothing") else 3
        record(SpreadCall(tokens=targets.size, embed=x.shape[-1], statistics=statistics))
        return token_losses(x, checkpoint_name(head, MARK), targets, **{**options, "axes": axes})

    ops = {EMBED_TOKENS: lookup, TOKEN_LOSSES: losses, VOCAB_PARTS: lambda: parts}
    return replace(in_force, ops={**in_force.ops, **ops})


def spread_leaves(
    closed: Any, paths: Sequence[str], vocab_dims: Mapping[int, int], *, sizes: Mapping[int, int], parts: int
) -> dict[int, int]:
    """The parameters that may stay in parts over the stages, each with its vocab dim.

    Args:
        closed: the loss traced under `with_spread_slots`: parameters first, in the order of `paths`.
        paths: of the parameters.
        vocab_dims: by position, the dim of every parameter outside of the layers that is named "vocab".
        sizes: by position, the size of that dim on one shard of the mesh's other axes.
        parts: the number of stages.

    Raises:
        ShardingError: no such parameter; one that is also used by something that needs all of it; a size that does not
            divide.
    """
    jaxpr = opened(closed)
    found, failures = {}, []
    for position, dim in vocab_dims.items():
        uses = list(_uses(jaxpr, {jaxpr.invars[position]}))
        others = [line for is_slot, line in uses if not is_slot]
        if len(others) == len(uses):  # somebody else's embedding or head: gathered
            continue
        if others:
            failures.append(
                f"{paths[position]} is also used whole{others[0] and f' ({others[0]})'}; fix: use it through "
                "shardlib.layers.VocabEmbed and CrossEntropyHead alone"
            )
        elif sizes[position] % parts:
            failures.append(
                f"{paths[position]}: vocab dim of size {sizes[position]} not divisible by stage={parts}; fix: "
                f"multiple={parts} (or a multiple of it) in VocabEmbed and CrossEntropyHead"
            )
        else:
            found[position] = dim
    raise_collected(failures, heading="the vocabulary cannot be spread over the stages:")
    if not found:
        named = ", ".join(paths[position] for position in vocab_dims) or "no parameter is named vocab"
        raise ShardingError(
            f"the vocabulary cannot be spread over the stages: no embedding or head of shardlib.layers found ({named})",
            fix='use shardlib.layers.VocabEmbed and CrossEntropyHead, or vocabulary="gathered"',
        )
    return found


def _uses(jaxpr: Any, held: set[Any]) -> Iterator[tuple[bool, str]]:
    """Every use of a variable: whether it is a slot's, and the model's line. Follows casts, moves and calls."""
    for equation in jaxpr.eqns:
        given = [not isinstance(atom, Literal) and atom in held for atom in equation.invars]
        if not any(given):
            continue
        name, key = equation.primitive.name, called(equation)
        if name == "name" and equation.params["name"] == MARK:
            yield True, ""
        elif name in _PASSES or name == "name":
            held |= set(equation.outvars)
        elif key is not None and len(opened(equation.params[key]).invars) == len(given):
            inner = opened(equation.params[key])
            inside = {var for var, is_given in zip(inner.invars, given, strict=True) if is_given}
            yield from _uses(inner, inside)
            held |= {out for out, made in zip(equation.outvars, inner.outvars) if _is_in(made, inside)}
        else:
            yield False, source_line(equation)


def _is_in(atom: Any, held: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in held


def local_shape(shape: tuple[int, ...], dim: int, *, parts: int) -> tuple[int, ...]:
    """The shape of one part."""
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])
