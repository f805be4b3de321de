"""Binding: every decision without devices, and every model, loss or rule that cannot be, refused with its fix."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import ShardingError
from shardlib.rules import Rules
from shardlib.strategies import default_rules
from tests.cases.test_rul import StatefulMLP, array, small_model

PLAN = sl.Plan(mesh="fsdp=2,tensor=4")


class Bare(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="up")(x)


def bind_loss(loss):
    model, _, spec = small_model()
    return sl.bind(model, loss, PLAN, spec)


@pytest.mark.newest
def test_linen_and_nnx_modules_and_factories_bind_alike():
    model, loss, spec = small_model()
    module = StatefulMLP(nnx.Rngs(0))
    graphdef = nnx.graphdef(module)
    stateful = lambda params, batch, rng: (nnx.merge(graphdef, params)(batch["x"]) ** 2).mean()  # noqa: E731
    bounds = [sl.bind(model, loss, PLAN, spec)]
    bounds += [sl.bind(form, stateful, PLAN, spec) for form in (module, StatefulMLP, lambda rngs: StatefulMLP(rngs))]
    entries = [[(entry.path, entry.spec) for entry in bound.params.entries] for bound in bounds]
    assert entries[0] == [("down/kernel", P("tensor", "fsdp")), ("up/kernel", P("fsdp", "tensor"))]
    assert all(found == entries[0] for found in entries)
    assert (bounds[1].ready_params is not None, bounds[2].ready_params) == (True, None)


def test_the_first_entry_of_the_spec_feeds_the_first_argument():
    model = LinenOnTokens()
    loss = lambda params, batch, rng: model.apply({"params": params}, batch["tokens"]).mean()  # noqa: E731
    # JAX sorts the keys of dicts; the user's order is what counts.
    spec = {"tokens": array(8, 64, axes=("batch", "embed")), "labels": array(8, axes=("batch",))}
    assert sl.bind(model, loss, PLAN, spec).params.entries[0].shape == (64, 16)


class LinenOnTokens(nn.Module):
    @nn.compact
    def __call__(self, anything):
        init = sl.annotate.logical(nn.initializers.ones, "embed", "mlp")
        return nn.Dense(16, use_bias=False, kernel_init=init)(anything)


def test_a_model_without_annotations_or_patterns():
    loss = lambda params, batch, rng: jnp.float32(0)  # noqa: E731
    spec = {"x": array(8, 64, axes=("batch", "embed"))}
    with pytest.raises(ShardingError) as caught:
        sl.bind(Bare(), loss, PLAN, spec)
    assert "no parameter of Bare has logical axes, and the rules have no patterns" in str(caught.value)
    assert 'save what "shardlib explain MODEL" proposes' in str(caught.value)
    patterns = ((".*/kernel", ("embed", "mlp")), (".*/bias", ("mlp",)))
    rules = Rules(rules=default_rules().rules, patterns=patterns)
    bound = sl.bind(Bare(), loss, sl.Plan(mesh="fsdp=2,tensor=4", rules=rules), spec)
    assert bound.params.specs == {"up": {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}}


def test_a_dead_pattern_is_an_error():
    model, loss, spec = small_model()
    rules = Rules(rules=default_rules().rules, patterns=(("up/kernl", ("embed", "mlp")),))
    with pytest.raises(ShardingError) as caught:
        sl.bind(model, loss, sl.Plan(mesh="fsdp=2", rules=rules), spec)
    assert "patterns that can never fire:" in str(caught.value)
    assert "pattern 'up/kernl' names no array" in str(caught.value)
    assert "(did you mean 'up/kernel'?)" in str(caught.value)


def test_a_rule_for_a_name_that_no_array_has_is_noticed():
    model, loss, spec = small_model()
    rules = default_rules().with_first(Rules.parse(["mpl -> tensor"]))
    bound = sl.bind(model, loss, sl.Plan(mesh="fsdp=2", rules=rules), spec)
    assert any("'mpl -> tensor' never fires" in n and "did you mean 'mlp'?" in n for n in bound.notices)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda p, b, r: b["x"].sum(axis=-1), "the loss has shape [8], not a scalar"),
        (lambda p, b, r: (b["x"].sum(), {}), "the loss is a tuple, not a scalar"),
        (lambda p, b, r: jnp.int32(1), "the loss has dtype int32"),
        (
            lambda p, b, r: sl.Loss(total=b["x"].sum(), weight=(p["up"]["kernel"] > 0).sum()),
            "the weight of the loss depends on the parameters",
        ),
        (lambda p, b, r: sl.constrain(b["x"], "batch", "embd").mean(), "no rule names the logical axis 'embd'"),
        (lambda p, b, r: sl.constrain(b["x"], "batch").mean(), "1 names for an array of rank 2 [8, 64]"),
        (lambda p, b, r: sl.constrain(b["x"][:, :63], None, "mlp").mean(), "size 63 not divisible by tensor=4"),
    ],
)
def test_a_wrong_loss_is_refused_when_it_is_bound(loss, says):
    with pytest.raises(ShardingError) as caught:
        bind_loss(loss)
    assert says in str(caught.value)


def test_a_weight_from_the_batch_is_fine():
    bind_loss(lambda p, b, r: sl.Loss(total=(b["x"] @ p["up"]["kernel"]).sum(), weight=(b["x"] > 0).sum()))


@pytest.mark.parametrize("model", ["models.gpt:small", 3, None, {"kernel": 1}])
def test_what_is_no_model(model):
    _, loss, spec = small_model()
    with pytest.raises(ShardingError, match="is not a Flax model\n  fix: give a linen module, an NNX module"):
        sl.bind(model, loss, PLAN, spec)


def test_a_factory_that_makes_something_else():
    _, loss, spec = small_model()
    with pytest.raises(ShardingError, match=r"the model factory returned int, not an nnx\.Module"):
        sl.bind(lambda rngs: 3, loss, PLAN, spec)


def test_a_mesh_that_is_still_to_be_inferred():
    model, loss, spec = small_model()
    with pytest.raises(ShardingError, match="-1 needs devices to count"):
        sl.bind(model, loss, sl.Plan(mesh="data=-1"), spec)


def test_activations_are_listed_once_with_their_dtype():
    model, _, spec = small_model()

    def loss(params, batch, rng):
        x = batch["x"].astype(jnp.bfloat16)
        for _ in range(2):
            x = sl.constrain(x, "batch", "embed")
        return (x @ params["up"]["kernel"]).mean().astype(jnp.float32)

    bound = sl.bind(model, loss, PLAN, spec)
    (entry,) = bound.activations
    assert (entry.path, entry.shape, entry.dtype) == ("(batch, embed)", (8, 64), "bfloat16")
    assert entry.bytes_per_device == 8 * 64 * 2 // 2


def test_explaining_needs_no_more_than_shapes():
    model, loss, spec = small_model()
    explanation = sl.bind(
        model, loss, sl.Plan(mesh="data=64,fsdp=16,tensor=4"), spec | {"x": array(16 * 64, 64, axes=("batch", "embed"))}
    ).explain(optax.sgd(0.1))
    assert explanation.num_parameters == 64 * 128 + 128 * 16
    assert jax.tree.leaves(explanation.totals["optimizer_state"].total) == [0]


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (
            "data=2,tensr=4",
            "no rule uses the axis 'tensr' (did you mean 'tensor'?), so its 4 devices would",
        ),
        ("data=2,expert=2", "no rule uses the axis 'expert', so its 2 devices would do the same work"),
    ],
)
def test_a_mesh_axis_that_no_rule_uses_is_an_error(mesh, says):
    model, loss, spec = small_model()
    with pytest.raises(ShardingError) as caught:
        sl.bind(model, loss, sl.Plan(mesh=mesh), spec)
    assert says in str(caught.value)
    assert "fix: leave" in str(caught.value)
    assert sl.bind(model, loss, sl.Plan(mesh="data=2,tensr=1"), spec)  # an axis of size 1 repeats nothing
