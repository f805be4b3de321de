"""A first pattern file for a model without annotations: regex -> logical axes, with the reason per line.

In: paths and shapes. Out: TOML ready to paste and correct; never used silently.

    print(propose(abstract_params).to_toml())
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from shardlib.decide import Names
from shardlib.specs import array_leaves

# (words in the path, rank without the stack axis, axes, reason); the first that fits wins.
_BY_NAME: Final[tuple[tuple[str, int, Names, str], ...]] = (
    (r"pos(ition)?s?(_?emb\w*)?|wpe", 2, ("position", "embed"), "a table over positions"),
    (r"(lm_?)?head|logits|unembed\w*|output_proj\w*", 2, ("embed", "vocab"), "the output head"),
    (r"\w*embed\w*|wte|tokens?", 2, ("vocab", "embed"), "an embedding table"),
    (r"q|query|q_proj|wq", 3, ("embed", "heads", "head_dim"), "the query projection"),
    (r"q|query|q_proj|wq", 2, ("embed", "heads"), "the query projection, flat: write heads[N] for N heads"),
    (r"k|v|key|value|[kv]_proj|w[kv]", 3, ("embed", "kv_heads", "head_dim"), "a key or value projection"),
    (r"k|v|key|value|[kv]_proj|w[kv]", 2, ("embed", "kv_heads"), "a key or value projection, flat: write kv_heads[N]"),
    (r"o|out|o_proj|wo|attn_out", 3, ("heads", "head_dim", "embed"), "the attention output projection"),
)
_BIASES: Final[tuple[tuple[str, Names, str], ...]] = (
    (r"q|query|q_proj|wq", ("heads", "head_dim"), "a bias per head"),
    (r"k|v|key|value|[kv]_proj|w[kv]", ("kv_heads", "head_dim"), "a bias per head"),
    (r"(lm_?)?head|logits", ("vocab",), "the output head's bias"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One proposed pattern; a static leaf."""

    regex: str
    names: Names
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Proposed patterns, one line per kind of path; a static leaf."""

    lines: tuple[Line, ...]

    def to_toml(self) -> str:
        """A rules file that extends the default rules, one commented pattern per line."""
        body = [
            f"{json.dumps(line.regex)} = {json.dumps([n or 'none' for n in line.names])}  # {line.reason}"
            for line in self.lines
        ]
        return "\n".join(['extends = "default"', "", "[patterns]", *body]) + "\n"


def is_bare(tree: Any) -> bool:
    """True when the tree has parameters and none of them carries logical axes."""
    leaves = [leaf for leaf in array_leaves(tree) if leaf.shape]
    return bool(leaves) and all(leaf.names is None for leaf in leaves)


def propose(tree: Any) -> Proposal:
    """Guesses logical axes from names and sizes.

    Args:
        tree: abstract parameters, as `specs.resolve` takes them.

    Returns:
        One line per kind of path, digits in paths generalised; every parameter is matched by one.
    """
    arrays = [(leaf.path, leaf.shape) for leaf in array_leaves(tree) if leaf.shape]
    stacked = _stacked_prefixes(arrays)
    embed = _embed_size(arrays, stacked)
    found: dict[str, dict[str, tuple[Names, str]]] = {}
    for path, shape in arrays:
        regex = "/".join(re.sub(r"[0-9]+", r"[0-9]+", re.escape(part)) for part in path.split("/"))
        is_stacked = path.split("/")[0] in stacked
        names, reason = _guess(path, shape[1:] if is_stacked else shape, embed)
        if is_stacked:
            names, reason = ("layers", *names), f"{reason}, stacked over layers"
        found.setdefault(regex, {})[path] = (names, reason)
    lines: list[Line] = []
    for regex, guesses in found.items():
        # Paths that differ in a number only are one line, unless their arrays are of different kinds.
        one_kind = len({names for names, _ in guesses.values()}) == 1
        kinds = {regex: next(iter(guesses.values()))} if one_kind else {re.escape(k): v for k, v in guesses.items()}
        lines += [Line(regex=kind, names=names, reason=reason) for kind, (names, reason) in kinds.items()]
    return Proposal(lines=tuple(lines))


def _guess(path: str, shape: tuple[int, ...], embed: int) -> tuple[Names, str]:
    words = path.lower().split("/")
    if words[-1] == "bias":
        for pattern, names, reason in _BIASES:
            if len(shape) == len(names) and any(re.fullmatch(pattern, word) for word in words):
                return names, reason
    for pattern, rank, names, reason in _BY_NAME:
        if len(shape) == rank and any(re.fullmatch(pattern, word) for word in words):
            return names, reason
    if len(shape) == 2:
        first, second = shape
        if first == embed and second != embed:
            return ("embed", "mlp"), f"reads the residual stream of {embed}"
        if second == embed and first != embed:
            return ("mlp", "embed"), f"writes the residual stream of {embed}"
        return ("embed", "mlp"), "a square product, taken as reading the residual stream"
    if len(shape) == 1:
        return (("embed",), "as long as the residual stream") if shape[0] == embed else (("mlp",), "along hidden units")
    return (None,) * (len(shape) - 1) + ("mlp",), "unknown kind: only its output dim is named"


def _stacked_prefixes(arrays: list[tuple[str, tuple[int, ...]]]) -> set[str]:
    """Top-level names whose arrays all start with one size, vectors included: layers stacked by scan or vmap."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for path, shape in arrays:
        groups.setdefault(path.split("/")[0], []).append(shape)
    return {
        name
        for name, shapes in groups.items()
        if len(shapes) > 2 and len({shape[0] for shape in shapes}) == 1 and min(len(shape) for shape in shapes) > 1
    }


def _embed_size(arrays: list[tuple[str, tuple[int, ...]]], stacked: set[str]) -> int:
    """The width of the residual stream: the last dim of the embedding table, or the size seen most often."""
    for path, shape in arrays:
        if len(shape) == 2 and any("embed" in word or word == "wte" for word in path.lower().split("/")):
            return shape[1]
    sizes = Counter(n for path, shape in arrays for n in (shape[1:] if path.split("/")[0] in stacked else shape))
    return sizes.most_common(1)[0][0]
