"""A plan is a value that goes through JSON unchanged, and any other text is an error of ours."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshes import MeshShape, ShardingError
from shardlib.plan import Plan
from shardlib.rules import Rules
from shardlib.strategies import default_rules


@pytest.mark.newest
@pytest.mark.parametrize("mesh", ["data=8", "data=-1,tensor=2", "replica=2,fsdp=4,own_name=3"])
def test_json_round_trips(mesh):
    rules = Rules.parse(
        ["batch -> data+fsdp", "mlp -> none"], patterns=(('.*"/\\d+', ("mlp", None)),), unknown="replicate"
    )
    options = {"num_microbatches": 4, "random_slices": 8, "compute_dtype": "bfloat16", "remat": "dots"}
    for plan in (Plan(mesh=mesh), Plan(mesh=mesh, rules=rules), Plan(mesh=mesh, **options)):
        assert Plan.from_json(plan.to_json()) == plan
        assert hash(Plan.from_json(plan.to_json())) == hash(plan)


def test_a_plan_by_hand_needs_only_a_mesh():
    plan = Plan.from_json('{"mesh": "data=2,tensor=4"}')
    assert plan == Plan(mesh=MeshShape.parse("data=2,tensor=4"))
    assert plan.rules == default_rules()
    own = Plan.from_json(json.dumps({"mesh": "data=2", "rules": 'extends = "default"\nrules = ["mlp -> none"]'}))
    assert [str(rule) for rule in own.rules.for_name("mlp")] == ["mlp -> none"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["mesh", "rules", "x"]), inner),
    max_leaves=5,
)


@given(st.text(max_size=60) | JSON.map(json.dumps))
@example("[" * 200_000)
@example('{"mesh": "data=2", "rules": "[patterns]\\n\\"(\\" = [\\"x\\"]"}')
@settings(deadline=None)
def test_any_text_is_a_plan_or_our_error(text):
    try:
        plan = Plan.from_json(text)
    except ShardingError:
        return
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", "plan: not JSON"),
        ("[]", 'plan: "mesh" is missing or not text'),
        ('{"mesh": 8}', 'plan: "mesh" is missing or not text\n  fix: write {"mesh": "data=2,tensor=4"}'),
        ('{"mesh": "data=x"}', "'x' is not a size of axis 'data'"),
        ('{"mesh": "data=2", "rule": ""}', "unknown key 'rule' (did you mean 'rules'?)"),
        ('{"mesh": "data=2", "rules": []}', 'plan: "rules" is not text'),
        ('{"mesh": "data=2", "rules": "rules = [\\"a\\"]"}', "plan rules: the rules cannot be read:"),
    ],
)
def test_mistakes_are_named(document, says):
    with pytest.raises(ShardingError) as caught:
        Plan.from_json(document)
    assert says in str(caught.value)


def test_rules_must_be_rules():
    with pytest.raises(ShardingError, match="a plan's rules are a Rules value, not list"):
        Plan(mesh="data=2", rules=["batch -> data"])
