"""A trainable subset of the parameters, and weight-decay masks, both chosen by path and logical axes.

In: a predicate or words, and what `resolve` found. Out: masks; parameters in two parts, and back in one.

    mask = mask_from(lambda path, axes: "lora_rank" in axes, resolution)
    trainable, frozen = split(params, mask)
    gradients = jax.grad(of_trainable(loss, frozen))(trainable, batch, rng)
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshes.errors import ShardingError, nearest, raise_collected
from shardlib.annotate import LAYERS
from shardlib.decide import Names, split_blocks
from shardlib.spec_axes import is_spec
from shardlib.specs import Entry, Resolution

Predicate = Callable[[str, Names], bool]
NO_DECAY = ("norm", "bias", "scale")


def mask_from(predicate: Predicate, resolution: Resolution) -> Any:
    """A tree of bools with the structure of the parameters: where the predicate holds.

    Args:
        predicate: of a parameter's path, such as "layers/mlp/up/kernel", and its logical axes.
        resolution: of the parameters.

    Raises:
        ShardingError: it holds for no parameter.
    """
    flags = [bool(predicate(entry.path, entry.names)) for entry in resolution.entries]
    if not any(flags):
        paths = "\n".join(f"- {entry.path} {_axes_text(entry.names)}" for entry in resolution.entries[:8])
        raise ShardingError(
            f"the predicate holds for none of {len(flags)} parameters, so nothing would be trained:\n{paths}",
            fix="test what a path and logical axes above have",
        )
    return _unflatten(resolution, flags)


def split(tree: Any, mask: Any) -> tuple[Any, Any]:
    """The tree where the mask holds, and where it does not; each with None, an empty node, in place of the rest.

    The parts keep the structure of dicts and of `nnx.State`, so an optimizer's state for one part has no array for
    the other. Parameters, specs, shardings and other masks are split alike.

    Args:
        tree: a tree of the mask's structure, or with a subtree in place of a leaf.
        mask: a tree of bools.

    Example:
        >>> split({"a": 1, "b": 2}, {"a": True, "b": False})
        ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    """
    chosen = jax.tree.map(lambda keep, part: part if keep else None, mask, tree)
    rest = jax.tree.map(lambda keep, part: None if keep else part, mask, tree)
    return chosen, rest


def merge(trainable: Any, frozen: Any) -> Any:
    """Undoes `split`: each leaf from the part that has it.

    Raises:
        ShardingError: parts of different trees, or a leaf that both or neither have.
    """
    is_none = lambda node: node is None  # noqa: E731
    parts = [jax.tree_util.tree_flatten_with_path(part, is_leaf=is_none) for part in (trainable, frozen)]
    (chosen, structure), (rest, other) = parts
    if structure != other:
        raise ShardingError(
            f"the parts to merge are of different trees:\n- {structure}\n- {other}", fix="merge what split returned"
        )
    raise_collected(
        [
            f"{jax.tree_util.keystr(path)}: {'in neither part' if a is None else 'in both parts'}"
            for (path, a), (_, b) in zip(chosen, rest, strict=True)
            if (a is None) == (b is None)
        ],
        heading="the parts to merge do not make one tree; fix: merge what split returned:",
    )
    leaves = [a if b is None else b for (_, a), (_, b) in zip(chosen, rest, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def of_trainable(loss: Callable[..., Any], frozen: Any) -> Callable[..., Any]:
    """The loss as a function of the trainable part alone: gradients exist for nothing else."""
    return lambda trainable, *rest: loss(merge(trainable, frozen), *rest)


def freeze(optimizer: optax.GradientTransformation, mask: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer where the mask holds; everything else stays bit-equal, and has no state.

    `optax.masked` alone would add the raw gradient to the rest. Gradients are still computed, and a device that
    flushes denormal numbers flushes those of the rest: `split` avoids both.

    Args:
        optimizer: for what is trained.
        mask: a tree of bools, True to train.
    """
    labels = jax.tree.map(lambda keep: "trainable" if keep else "frozen", mask)
    return optax.partition({"trainable": optimizer, "frozen": _still()}, labels)


def decay_mask(resolution: Resolution, *, without: Sequence[str] = NO_DECAY) -> Any:
    """Where weight decay applies: matrices, unless a word of their path or a logical axis is listed.

    What has one dim besides stacked layers is a vector (a bias or scale of [layers, embed] too) and never decays.

    Args:
        resolution: of the parameters.
        without: words of paths ("norm" is a word of `attention_norm` and of `LayerNorm_0`) and logical axes
            ("vocab") whose parameters do not decay.

    Returns:
        A tree of bools for `optax.adamw(mask=...)` or `optax.add_decayed_weights(mask=...)`; `split` it for an
        optimizer of the trainable part.

    Raises:
        ShardingError: a word beyond the default ones that no parameter has.

    Source: decay for matrices alone is `configure_optimizers` of karpathy/nanoGPT, which counts dims; here the names
        say which of them is a stack.
    """
    words = [_words(entry) for entry in resolution.entries]
    known = set[str]().union(*words)
    raise_collected(
        [
            f"{word!r} is no word of a path and no logical axis of these parameters{nearest(word, known)}; "
            "fix: correct or drop it"
            for word in without
            if word not in known and word not in NO_DECAY
        ],
        heading="weight decay cannot be masked by",
    )
    return _unflatten(
        resolution,
        [
            _num_dims(entry) > 1 and not own.intersection(without)
            for entry, own in zip(resolution.entries, words, strict=True)
        ],
    )


def _unflatten(resolution: Resolution, flags: list[bool]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(resolution.specs, is_leaf=is_spec), flags)


def _words(entry: Entry) -> set[str]:
    """Lower-case words of the path, split at case changes too, and logical axes."""
    separate = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", entry.path)
    words = {word.lower() for word in re.split(r"[^A-Za-z0-9]+", separate) if word}
    return words | {split_blocks(name)[0] for name in entry.names if name}


def _num_dims(entry: Entry) -> int:
    """Dims besides the stack of layers."""
    return len(entry.shape) - sum(name == LAYERS for name in entry.names)


def _axes_text(names: Names) -> str:
    return "(" + ", ".join(name or "none" for name in names) + ")"


def _still() -> optax.GradientTransformation:
    # x + -0.0 is x for every x; x + 0.0 turns -0.0 into 0.0.
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.0), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
