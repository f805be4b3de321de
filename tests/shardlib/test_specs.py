"""Specs of whole trees: linen and NNX through one resolver, patterns, every failure at once, notices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, abstract_mesh, make_mesh
from meshes.shape import MeshShape
from shardlib import annotate
from shardlib.batch_spec import ArraySpec
from shardlib.place import shardings
from shardlib.rules import Rules
from shardlib.specs import resolve
from shardlib.strategies import default_rules

RULES = Rules.parse(["embed -> fsdp", "mlp -> tensor", "vocab -> tensor", "layers -> none"])
MESH = "fsdp=2,tensor=4"


def abstract(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def linen_tree(arrays: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]):
    return {name: annotate.LogicalAxes(abstract(*shape), names) for name, (shape, names) in arrays.items()}


def nnx_tree(arrays):
    flat = {
        (name,): nnx.Param(abstract(*shape), **{annotate.METADATA_KEY: names})
        for name, (shape, names) in arrays.items()
    }
    return nnx.from_flat_state(flat)


DIMS = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 6, 8]), st.sampled_from(["embed", "mlp", "vocab", "layers", None])), max_size=4
)
TREES = st.dictionaries(st.sampled_from("abcd"), DIMS, min_size=1).map(
    lambda tree: {k: (tuple(n for n, _ in dims), tuple(name for _, name in dims)) for k, dims in tree.items()}
)


@pytest.mark.newest
@given(TREES, st.sampled_from(["error", "replicate", "next"]))
@settings(max_examples=60, deadline=None)
def test_linen_and_nnx_agree(arrays, policy):
    rules = Rules(rules=RULES.rules, indivisible=policy)
    outcomes = []
    for tree in (linen_tree(arrays), nnx_tree(arrays)):
        try:
            outcomes.append(resolve(tree, rules, MESH))
        except ShardingError as error:
            outcomes.append(str(error))
    linen, stateful = outcomes
    if isinstance(linen, str):
        assert linen == stateful
        return
    assert linen.entries == stateful.entries
    assert linen.notices == stateful.notices
    assert list(linen.specs.values()) == jax.tree.leaves(stateful.specs, is_leaf=lambda node: isinstance(node, P))
    for entry in linen.entries:
        assert len(entry.spec) == len(entry.shape) == len(entry.decisions)
        used = [axis for decision in entry.decisions for axis in decision.mesh_axes]
        assert len(used) == len(set(used))
        assert all(decision.reason for decision in entry.decisions)
        sharding = jax.NamedSharding(abstract_mesh(MESH), entry.spec)
        assert entry.bytes_per_device == 4 * jnp.prod(jnp.array((1, *sharding.shard_shape(entry.shape)))).item()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        names = annotate.logical(nn.initializers.lecun_normal(), "embed", "mlp")
        return nn.Dense(16, kernel_init=names, bias_init=annotate.logical(nn.initializers.zeros, "mlp"))(x)


class Stateful(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        names = annotate.nnx_logical(nnx.initializers.lecun_normal(), "embed", "mlp")
        bias = annotate.nnx_logical(nnx.initializers.zeros, "mlp")
        self.Dense_0 = nnx.Linear(8, 16, kernel_init=names, bias_init=bias, rngs=rngs)


def test_modules_of_both_kinds_give_the_same_specs():
    boxed = jax.eval_shape(Linen().init, jax.random.key(0), jnp.ones((1, 8)))
    linen = resolve(boxed["params"], RULES, MESH)
    stateful = resolve(nnx.eval_shape(lambda: Stateful(nnx.Rngs(0))), RULES, MESH)
    assert linen.entries == stateful.entries
    assert linen.specs == {"Dense_0": {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}}
    whole = resolve(boxed, RULES, MESH)
    assert whole.specs == {"params": linen.specs}
    assert [entry.path for entry in whole.entries] == ["params/Dense_0/bias", "params/Dense_0/kernel"]


@pytest.mark.newest
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_any_kind_of_mesh_gives_the_same_specs(axis_type):
    tree = linen_tree({"w": ((8, 16), ("embed", "mlp"))})
    mesh = make_mesh(MESH, axis_type=axis_type)
    forms = (mesh, mesh.abstract_mesh, abstract_mesh(MESH, axis_type=axis_type), MeshShape.parse(MESH), MESH)
    assert all(resolve(tree, RULES, form).specs == {"w": P("fsdp", "tensor")} for form in forms)
    placed = jax.device_put({"w": jnp.ones((8, 16))}, shardings({"w": P("fsdp", "tensor")}, mesh))
    assert placed["w"].addressable_shards[0].data.shape == (4, 4)


def test_every_failure_is_collected_with_path_and_fix():
    tree = linen_tree(
        {
            "odd": ((8, 18), ("embed", "mlp")),
            "typo": ((8, 16), ("embd", "mlp")),
            "rank": ((3, 8, 16), ("embed", "mlp")),
            "stack": ((2, 2, 8), ("embed",)),
        }
    ) | {"bare": abstract(8, 16)}
    rules = Rules.parse([*map(str, RULES.rules), "heads -> tensr"])
    with pytest.raises(ShardingError) as caught:
        resolve(tree, rules, MESH)
    text = str(caught.value)
    for line in (
        "6 problem(s) placing arrays on mesh fsdp=2,tensor=4:",
        "rule 'heads -> tensr': 'tensr' is no axis of mesh fsdp=2,tensor=4, nor a standard one "
        "(did you mean 'tensor'?); fix: correct the name",
        "odd [8, 18] dim 1 'mlp': size 18 not divisible by tensor=4 (rule 'mlp -> tensor'); fix: change a size, "
        'or write "mlp -> tensor; indivisible=replicate"',
        "typo [8, 16] dim 0: no rule names the logical axis 'embd' (did you mean 'embed'?); fix: correct the name",
        "rank [3, 8, 16] has rank 3 but its annotation names 2 axes (embed, mlp); "
        "fix: if nnx.vmap stacked it, call annotate.name_stack(module)",
        "stack [2, 2, 8] has rank 3 but its annotation names 1 axes (embed); fix: give one name (or None) per dim",
        "bare [8, 16] has no logical axes, so no rule can place it on the mesh; "
        'fix: annotate it, or add a pattern such as "bare" = ["...", "..."]',
    ):
        assert line in text, text


def test_patterns_name_bare_arrays_first_match_wins():
    tree = {"block": {"up": abstract(8, 16), "down": abstract(16, 8), "scale": abstract()}}
    patterns = ((".*/up", ("embed", "mlp")), (".*(up|down)", ("mlp", "embed")))
    found = resolve(tree, Rules(rules=RULES.rules, patterns=patterns), MESH)
    assert found.specs == {"block": {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "scale": P()}}
    assert found.dead_patterns == ()
    dead = resolve(tree, Rules(rules=RULES.rules, patterns=(patterns[1], patterns[0])), MESH)
    assert dead.dead_patterns == (".*/up",)
    with pytest.raises(ShardingError, match=r"rank 2 but pattern '\.\*' names 1 axes"):
        resolve(tree, Rules(rules=RULES.rules, patterns=((".*", ("embed",)),)), MESH)


def test_notices_name_what_is_legal_and_worth_saying():
    rules = Rules.parse(
        ["layers -> stage", "embed -> fsdp", "mlp -> fsdp+tensor", "vocab -> tensor; indivisible=replicate"],
        unknown="replicate",
    )
    tree = linen_tree(
        {
            "stack": ((4, 8, 16), ("layers", "embed", "mlp")),
            "square": ((8, 8), ("embed", "embed")),
            "vocab": ((8, 17), ("embed", "vocab")),
            "new": ((8,), ("brandnew",)),
        }
    )
    found = resolve(tree, rules, "stage=2,fsdp=2,tensor=2")
    text = "\n".join(found.notices)
    for line in (
        "stack [4, 8, 16]: layers sharded over stage without a pipeline is weight sharding: "
        "every rank of stage repeats the compute of all layers",
        "stack [4, 8, 16] dim 2 'mlp': fsdp already used by dim 1; rule 'mlp -> fsdp+tensor' keeps tensor",
        "square [8, 8]: the name 'embed' appears twice; the first dim has the first choice",
        "vocab [8, 17] dim 1 'vocab': size 17 not divisible by tensor=2: replicated by policy (272 bytes on each",
        "new [8] dim 0 'brandnew': unknown logical axis, replicated by unknown=replicate (32 bytes on each device)",
    ):
        assert line in text, text


def test_default_rules_name_the_axes_of_every_strategy():
    rules = default_rules()
    tree = {
        "table": ArraySpec(shape=(64, 32), dtype="float32", axes=("vocab", "embed")),
        "kernel": ArraySpec(shape=(32, 4, 8), dtype="float32", axes=("embed", "heads", "head_dim")),
        "stream": ArraySpec(shape=(8, 16, 32), dtype="float32", axes=("batch", "length", "embed")),
        "tokens": ArraySpec(shape=(8, 16), dtype="int32", axes=("batch", "length")),
    }
    assert resolve(tree, rules, "data=2,fsdp=2,tensor=2").specs == {
        "table": P("tensor", "fsdp"),
        "kernel": P("fsdp", "tensor", None),
        "stream": P(("data", "fsdp"), "tensor", None),
        "tokens": P(("data", "fsdp"), None),
    }


def test_other_variables_than_parameters_are_replicated_with_a_notice():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.mean = nnx.BatchStat(jnp.zeros((4,)))

    found = resolve(Noisy(nnx.Rngs(0)), RULES, MESH)
    assert all(not decision.mesh_axes for entry in found.entries for decision in entry.decisions)
    assert "mean [4] is not a parameter and has no logical axes: replicated" in found.notices
