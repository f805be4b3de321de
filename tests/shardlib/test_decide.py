"""The resolver for one array: which rule wins, what stops it, and that every dim hears why."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.shape import MeshShape
from shardlib.annotate import blocks
from shardlib.decide import decide, spec_of
from shardlib.rules import Rules

LOGICAL = st.sampled_from(["a", "b", "c"])
AXES = st.sampled_from(["x", "y", "z"])
LINES = st.builds(
    lambda name, axes, policy: f"{name} -> {'+'.join(axes) or 'none'}; indivisible={policy}",
    LOGICAL,
    st.lists(AXES, max_size=2, unique=True),
    st.sampled_from(["error", "replicate", "next"]),
)
MESHES = st.dictionaries(AXES, st.sampled_from([1, 2, 3, 4]), min_size=1).map(
    lambda sizes: MeshShape(axes=tuple(sizes.items()))
)


@st.composite
def rule_sets(draw):
    """Rules without dead ones: at most one line after another for each name."""
    kept = Rules(rules=())
    for line in draw(st.lists(LINES, max_size=6)):
        try:
            kept = Rules.parse([*map(str, kept.rules), line], unknown=draw(st.sampled_from(["error", "replicate"])))
        except ValueError:
            continue
    return kept


@pytest.mark.newest
@given(
    st.lists(st.tuples(st.none() | LOGICAL, st.integers(1, 24)), max_size=4),
    rule_sets(),
    MESHES,
)
def test_no_axis_twice_and_a_reason_for_every_dim(dims, rules, mesh):
    names, shape = tuple(name for name, _ in dims), tuple(size for _, size in dims)
    decisions = decide(names, shape, rules=rules, mesh=mesh)
    assert [decision.dim for decision in decisions] == list(range(len(dims)))
    assert all(decision.reason for decision in decisions)
    used = [axis for decision in decisions for axis in decision.mesh_axes]
    assert len(used) == len(set(used))
    assert all(mesh.size(axis) > 1 for axis in used)
    for decision in decisions:
        assert decision.size % math.prod(mesh.size(axis) for axis in decision.mesh_axes) == 0
        assert not (decision.problem and decision.mesh_axes)
        if decision.problem:
            assert "fix: " in decision.problem
    assert len(spec_of(decisions)) == len(dims)
    assert decisions == decide(names, shape, rules=rules, mesh=mesh)


def reasons(names, shape, lines, mesh, **options):
    decisions = decide(names, shape, rules=Rules.parse(lines, **options), mesh=MeshShape.parse(mesh))
    return [(decision.mesh_axes, decision.reason) for decision in decisions]


def test_every_kind_of_reason():
    lines = ["embed -> tensor", "mlp -> tensor", "heads -> none", "kv -> expert", "w -> data"]
    found = reasons(("embed", "mlp", "heads", "kv", None, "w"), (8, 8, 8, 8, 8, 8), lines, "tensor=4,data=1")
    assert found == [
        (("tensor",), "rule 'embed -> tensor'"),
        ((), "tensor already used by dim 0"),
        ((), "replicated by rule 'heads -> none'"),
        ((), "no mesh axis expert"),
        ((), "unnamed dim, never split"),
        ((), "data has size 1"),
    ]


@pytest.mark.parametrize(
    ("policy", "axes", "reason"),
    [
        ("error", (), "size 50257 not divisible by tensor=4"),
        ("replicate", (), "size 50257 not divisible by tensor=4: replicated by policy"),
        ("next", (), "size 50257 not divisible by tensor=4; replicated by rule 'vocab -> none'"),
    ],
)
def test_policies_for_a_size_that_does_not_divide(policy, axes, reason):
    lines = [f"vocab -> tensor; indivisible={policy}", "vocab -> none"]
    (decision,) = decide(("vocab",), (50257,), rules=Rules.parse(lines), mesh=MeshShape.parse("tensor=4"))
    assert (decision.mesh_axes, decision.reason) == (axes, reason)
    assert bool(decision.problem) == (policy == "error")
    if decision.problem:
        assert 'or write "vocab -> tensor; indivisible=replicate"' in decision.problem
    assert bool(decision.remark) == (policy == "replicate")


def test_a_partly_taken_tuple_keeps_what_is_free_and_says_so():
    lines = ["batch -> data", "embed -> data+fsdp"]
    first, second = decide(("batch", "embed"), (8, 8), rules=Rules.parse(lines), mesh=MeshShape.parse("data=2,fsdp=2"))
    assert (first.mesh_axes, second.mesh_axes) == (("data",), ("fsdp",))
    assert second.remark == "dim 1 'embed': data already used by dim 0; rule 'embed -> data+fsdp' keeps fsdp"
    lines[1] += "; taken=error"
    _, second = decide(("batch", "embed"), (8, 8), rules=Rules.parse(lines), mesh=MeshShape.parse("data=2,fsdp=2"))
    assert second.mesh_axes == ()
    assert "data already used by dim 0" in second.problem
    assert "fix: drop taken=error" in second.problem


def test_a_rule_beside_another_dim():
    lines = ["length -> tensor; beside=embed", "length -> none", "embed -> none"]
    assert reasons(("length", "embed"), (8, 8), lines, "tensor=4")[0][0] == ("tensor",)
    axes, reason = reasons(("length",), (8,), lines, "tensor=4")[0]
    assert axes == ()
    assert "needs a dim 'embed'" in reason


def test_unknown_names_are_errors_with_the_nearest_name():
    (decision,) = decide(("embd",), (8,), rules=Rules.parse(["embed -> fsdp"]), mesh=MeshShape.parse("fsdp=2"))
    assert decision.problem == (
        "dim 0: no rule names the logical axis 'embd' (did you mean 'embed'?); "
        'fix: correct the name, or add the rule "embd -> none"'
    )


def test_flat_dims_are_cut_between_blocks_only():
    rules = Rules.parse(["kv_heads -> tensor; indivisible=replicate"])
    for tensor, wanted in ((2, ("tensor",)), (4, ())):
        mesh = MeshShape.parse(f"tensor={tensor}")
        (decision,) = decide((blocks("kv_heads", 2),), (8,), rules=rules, mesh=mesh)
        assert decision.mesh_axes == wanted
    assert decision.reason.startswith("2 blocks of 4 not divisible by tensor=4")
    (decision,) = decide((blocks("kv_heads", 3),), (8,), rules=rules, mesh=mesh)
    assert "8 is not a multiple of 3 blocks; fix: correct the count" in decision.problem
