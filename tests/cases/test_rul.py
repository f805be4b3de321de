"""Field troubles, group RUL: logical-axis rules -> specs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import ShardingError, make_mesh
from shardlib import annotate
from shardlib.batch_spec import ArraySpec
from shardlib.rules import Rules
from shardlib.specs import resolve
from tests.oracle import assert_trees_equal, host


def array(*shape, axes):
    return ArraySpec(shape=shape, dtype="float32", axes=axes)


@pytest.mark.newest
def test_rul_01_rule_order():
    rules = Rules.parse(["batch -> data", "length -> none", "embed -> model", "embed -> data"])
    tree = {
        "activation": array(8, 16, 32, axes=("batch", "length", "embed")),
        "kernel": array(8, 8, axes=("embed", "batch")),
        "alone": array(8, axes=("embed",)),
    }
    specs = resolve(tree, rules, "data=4,model=2").specs
    assert specs == {"activation": P("data", None, "model"), "kernel": P("model", "data"), "alone": P("model")}


def test_rul_03_no_silent_no_op():
    mesh = make_mesh("data=4,tensor=2")
    rules = Rules.parse(["batch -> data"])
    x = jnp.ones((8, 4))
    ways = {}
    lower = lambda: jax.jit(sl.with_rules(lambda x: sl.constrain(x * 2, "batch", None), rules, mesh)).lower(x).as_text()  # noqa: E731
    ways["no context"] = lower()
    with jax.set_mesh(mesh):
        ways["set_mesh"] = lower()
    with pytest.warns(DeprecationWarning, match="with mesh"), mesh:
        ways["legacy context"] = lower()
    ways["abstract mesh"] = (
        jax.jit(sl.with_rules(lambda x: sl.constrain(x * 2, "batch", None), rules, mesh.abstract_mesh))
        .lower(jax.device_put(x, jax.NamedSharding(mesh, P())))
        .as_text()
    )
    for way, text in ways.items():
        assert "sharding_constraint" in text, way
        assert '"data"' in text, way
    assert "sharding_constraint" not in jax.jit(lambda x: sl.constrain(x * 2, "batch", None)).lower(x).as_text()


class Vector(nnx.Module):
    def __init__(self, init):
        self.scale = nnx.Param(init(jax.random.key(0), (12,), jnp.float32))


def test_rul_04_no_mesh_and_no_rules():
    init = annotate.nnx_logical(nnx.initializers.ones, "embed")
    module = Vector(init)  # builds without a mesh
    found = resolve(module, Rules(rules=(), unknown="replicate"), "data=1")
    assert [entry.spec for entry in found.entries] == [P(None)]
    with pytest.raises(ShardingError) as caught:
        resolve(module, Rules(rules=()), "data=4")
    assert "scale [12]" in str(caught.value)
    assert "mesh" in str(caught.value)
    # Flax's own eager annotation needs a mesh and says so deep inside: ours names the way out.
    flax_init = nnx.with_partitioning(nnx.initializers.ones, ("embed",))
    spec = {"x": array(8, 12, axes=("batch", "embed"))}
    loss = lambda params, batch, rng: jnp.float32(0)  # noqa: E731
    with pytest.raises(ShardingError, match=r"cannot be built without a mesh.*\n.*annotate.nnx_logical"):
        sl.bind(lambda rngs: Vector(flax_init), loss, sl.Plan(mesh="data=4"), spec)


def test_rul_05_partial_rule_loss():
    rules = Rules.parse(["batch -> data"], unknown="replicate")
    mesh = make_mesh("data=4,tensor=2")
    found = jax.jit(sl.with_rules(lambda x: sl.constrain(x, "batch", "brandnew"), rules, mesh))(jnp.ones((8, 16)))
    assert found.addressable_shards[0].data.shape == (2, 16)
    model, loss, spec = small_model(lambda x: sl.constrain(x, "batch", "brandnew"))
    rules = Rules.parse(["batch -> data", "embed -> none", "mlp -> none"], unknown="replicate")
    bound = sl.bind(model, loss, sl.Plan(mesh="data=4,tensor=2", rules=rules), spec)
    (notice,) = [notice for notice in bound.notices if "brandnew" in notice]
    assert "(batch, brandnew) [8, 16] dim 1 'brandnew': unknown logical axis, replicated by unknown=replicate" in notice


def test_rul_07_typo_or_missing_rule():
    rules = Rules.parse(["batch -> data", "embed -> model"])
    tree = {"typo": array(256, 256, axes=("embd", "mlp")), "fine": array(256, 256, axes=("embed", "mlp"))}
    with pytest.raises(ShardingError) as caught:
        resolve(tree, rules, "data=4,model=2")
    text = str(caught.value)
    assert "typo [256, 256] dim 0: no rule names the logical axis 'embd' (did you mean 'embed'?)" in text
    assert "typo [256, 256] dim 1: no rule names the logical axis 'mlp'" in text
    assert "fine [256, 256] dim 1: no rule names the logical axis 'mlp'" in text
    lenient = resolve(tree, Rules.parse([*map(str, rules.rules), "mlp -> none"], unknown="replicate"), "data=4,model=2")
    (notice,) = lenient.notices
    assert notice.startswith("typo [256, 256] dim 0 'embd': unknown logical axis, replicated by unknown=replicate")
    assert "(262,144 bytes on each device)" in notice


@pytest.mark.newest
def test_rul_08_tuple_axis():
    rules = Rules.parse(["batch -> data+fsdp", "embed -> none"])
    mesh = make_mesh("data=2,fsdp=4")
    specs = resolve({"x": array(16, 8, axes=("batch", "embed"))}, rules, mesh).specs
    assert specs == {"x": P(("data", "fsdp"), None)}
    placed = jax.device_put({"x": jnp.ones((16, 8))}, sl.shardings(specs, mesh))
    assert [shard.data.shape for shard in placed["x"].addressable_shards] == [(2, 8)] * 8


class LinenMLP(nn.Module):
    middle: object = None

    @nn.compact
    def __call__(self, x):
        up = annotate.logical(nn.initializers.lecun_normal(), "embed", "mlp")
        down = annotate.logical(nn.initializers.lecun_normal(), "mlp", "embed")
        x = nn.gelu(nn.Dense(128, use_bias=False, kernel_init=up, name="up")(x))
        x = nn.Dense(16, use_bias=False, kernel_init=down, name="down")(x)
        return self.middle(x) if self.middle else x


class StatefulMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        up = annotate.nnx_logical(nnx.initializers.lecun_normal(), "embed", "mlp")
        down = annotate.nnx_logical(nnx.initializers.lecun_normal(), "mlp", "embed")
        self.up = nnx.Linear(64, 128, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(128, 16, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def small_model(middle=None):
    model = LinenMLP(middle)
    loss = lambda params, batch, rng: (model.apply({"params": params}, batch["x"]) ** 2).mean()  # noqa: E731
    return model, loss, {"x": array(8, 64, axes=("batch", "embed"))}


def specs_by_name(tree, rules=None):
    found = resolve(tree, rules or Rules.parse(["embed -> fsdp", "mlp -> tensor"]), "fsdp=2,tensor=4")
    return {("up" if "up" in entry.path else "down"): entry.spec for entry in found.entries}


def test_rul_09_annotations_survive_a_bridge():
    x = jnp.ones((2, 64))
    wanted = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
    bare_linen = jax.eval_shape(LinenMLP().init, jax.random.key(0), x)["params"]
    assert specs_by_name(bare_linen) == wanted
    assert specs_by_name(nnx.eval_shape(lambda: StatefulMLP(nnx.Rngs(0)))) == wanted
    as_nnx = nnx.eval_shape(lambda: nnx.bridge.ToNNX(LinenMLP(), rngs=nnx.Rngs(0)).lazy_init(x))
    assert specs_by_name(nnx.state(as_nnx, nnx.Param)) == wanted
    as_linen = nnx.bridge.to_linen(StatefulMLP)
    assert specs_by_name(jax.eval_shape(as_linen.init, jax.random.key(0), x)["params"]) == wanted


def test_rul_11_size_one_axis():
    model, loss, spec = small_model()
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 64)).astype(np.float32)}
    runs = {}
    for mesh in ("data=1", "data=1,tensor=8", "data=8,tensor=1"):
        bound = sl.bind(model, loss, sl.Plan(mesh=mesh), spec)
        trainer = sl.Trainer(bound, optax.sgd(1.0))
        state, metrics = trainer.step(trainer.init(jax.random.key(0)), batch)
        runs[mesh] = (float(metrics["loss"]), host(state.params))
        assert "size 1" in str(bound.explain()) or mesh == "data=1"
    for loss_value, params in runs.values():
        assert loss_value == pytest.approx(runs["data=1"][0], rel=1e-6)
        assert_trees_equal(params, runs["data=1"][1], "parameter")


def test_rul_12_repeated_name():
    found = resolve({"kernel": array(32, 32, axes=("embed", "embed"))}, Rules.parse(["embed -> fsdp"]), "fsdp=8")
    assert found.specs == {"kernel": P("fsdp", None)}
    assert found.notices == ("kernel [32, 32]: the name 'embed' appears twice; the first dim has the first choice",)
