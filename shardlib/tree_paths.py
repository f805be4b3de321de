"""Paths into pytrees as text: `decoder/layers/mlp/kernel`. Bottom layer, no other module of ours below it.

In: key paths of linen dicts, NNX states, dataclasses, optimizer states. Out: one spelling for all.

    path_text((DictKey("mlp"), DictKey("kernel")))    # "mlp/kernel"
"""

from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def path_text(path: tuple[Any, ...]) -> str:
    """The path joined by slashes; the `.value` that an NNX variable adds to its own path is left out."""
    parts = [_key_text(key) for key in path]
    if path and isinstance(path[-1], GetAttrKey) and path[-1].name == "value" and len(parts) > 1:
        parts.pop()
    return "/".join(parts)


def leaves_with_paths(tree: Any, *, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """`(path text, leaf)` for every leaf, in tree order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(path_text(path), leaf) for path, leaf in flat]


def _key_text(key: Any) -> str:
    match key:
        case DictKey(key=name) | GetAttrKey(name=name):
            return str(name)
        case SequenceKey(idx=index) | FlattenedIndexKey(key=index):
            return str(index)
    return str(key)
