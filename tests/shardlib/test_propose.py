"""Proposed patterns name every array of a bare model, read back, and are guesses a reader would make."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardlib.propose import is_bare, propose
from shardlib.rules import Rules
from shardlib.specs import resolve
from shardlib.strategies import default_rules


def tree_of(shapes: dict[str, tuple[int, ...]]) -> dict:
    tree: dict = {}
    for path, shape in shapes.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


GPT2 = {
    "wte": (64, 32),
    "wpe": (16, 32),
    "h_0/attn/q_proj/kernel": (32, 4, 8),
    "h_0/attn/q_proj/bias": (4, 8),
    "h_0/attn/o_proj/kernel": (4, 8, 32),
    "h_0/ln/scale": (32,),
    "h_0/mlp/up/kernel": (32, 128),
    "h_0/mlp/up/bias": (128,),
    "h_0/mlp/down/kernel": (128, 32),
    "h_1/mlp/up/kernel": (32, 128),
    "lm_head/kernel": (32, 64),
}


def test_guesses_a_reader_would_make():
    lines = {line.regex: (line.names, line.reason) for line in propose(tree_of(GPT2)).lines}
    assert {regex: names for regex, (names, _) in lines.items()} == {
        "wte": ("vocab", "embed"),
        "wpe": ("position", "embed"),
        "h_[0-9]+/attn/q_proj/kernel": ("embed", "heads", "head_dim"),
        "h_[0-9]+/attn/q_proj/bias": ("heads", "head_dim"),
        "h_[0-9]+/attn/o_proj/kernel": ("heads", "head_dim", "embed"),
        "h_[0-9]+/ln/scale": ("embed",),
        "h_[0-9]+/mlp/up/kernel": ("embed", "mlp"),
        "h_[0-9]+/mlp/up/bias": ("mlp",),
        "h_[0-9]+/mlp/down/kernel": ("mlp", "embed"),
        "lm_head/kernel": ("embed", "vocab"),
    }
    assert all(reason for _, reason in lines.values())


def test_the_proposal_is_a_rules_file_that_works():
    tree = tree_of(GPT2)
    rules = Rules.from_toml(propose(tree).to_toml(), base=default_rules())
    found = resolve(tree, rules, "fsdp=2,tensor=4")
    assert found.dead_patterns == ()
    assert found.specs["h_1"]["mlp"]["up"]["kernel"] == P("fsdp", "tensor")


def test_stacked_layers_get_their_axis():
    tree = tree_of({"embed": (64, 32), "layers/up": (4, 32, 128), "layers/down": (4, 128, 32), "layers/scale": (4, 32)})
    names = {line.regex: line.names for line in propose(tree).lines}
    assert names["layers/up"] == ("layers", "embed", "mlp")
    assert names["layers/scale"] == ("layers", "embed")


PATHS = st.lists(st.sampled_from(["a1", "a2", "embed", "q", "kernel", "x.y", "bias"]), min_size=1, max_size=3).map(
    "/".join
)


@pytest.mark.newest
@given(st.dictionaries(PATHS, st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=4).map(tuple), min_size=1))
@settings(deadline=None)
def test_every_array_of_any_bare_tree_is_named(shapes):
    shapes = {path: shape for path, shape in shapes.items() if not any(path.startswith(f"{p}/") for p in shapes)}
    tree = tree_of(shapes)
    assert is_bare(tree)
    rules = Rules.from_toml(propose(tree).to_toml(), base=default_rules())
    assert resolve(tree, rules, "data=1").dead_patterns == ()
    assert len(resolve(tree, rules, "data=1").entries) == len(shapes)
