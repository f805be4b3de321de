"""Halves of a block on a stream divided along its length: one device's results and gradients, and what they send."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from meshes import ShardingError, make_mesh
from models import gpt
from shardlib import annotate
from shardlib.audit.hlo import parse
from shardlib.ops import sequence_parallel as module
from shardlib.ops.sequence_parallel import sequence_parallel, summed_gradients
from tests import oracle
from tests.moving import QUICK
from tests.oracle import assert_trees_equal

BATCH, LENGTH, EMBED, MLP, HEADS = 4, 16, 8, 48, 8
DRAW = np.random.default_rng(0)


def drawn(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


X, COTANGENT = drawn(BATCH, LENGTH, EMBED), drawn(BATCH, LENGTH, EMBED)
NORM = {"scale": drawn(EMBED), "bias": drawn(EMBED), "out": drawn(EMBED)}
WEIGHTS = {
    "mlp": {"up": drawn(EMBED, MLP) / 3, "hidden": drawn(MLP), "down": drawn(MLP, EMBED) / 5},
    "attention": {"qkv": drawn(3, EMBED, HEADS, 2) / 3, "out": drawn(HEADS, 2, EMBED) / 4, "slope": drawn(2)},
}
SPECS = {
    "mlp": {"up": P(None, "tensor"), "hidden": P("tensor"), "down": P("tensor", None)},
    "attention": {"qkv": P(None, None, "tensor"), "out": P("tensor"), "slope": P()},
}
DOCUMENTS = np.sort(DRAW.integers(0, 3, (BATCH, LENGTH)).astype(np.int32), axis=1)


def norm(whole, x):
    mean, square = x.mean(axis=-1, keepdims=True), (x**2).mean(axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5) * whole["scale"][None, None] + whole["bias"][None, None]


def mlp(weights, x):
    return jax.nn.gelu(x @ weights["up"] + weights["hidden"][None, None]) @ weights["down"]


def attention(weights, x, documents):
    """Local heads over the whole length; "slope", the same for all of them, is whole on every shard."""
    query, key, value = (jnp.einsum("ble,ehd->blhd", x, kernel) for kernel in weights["qkv"])
    seen = documents[:, None, :, None] == documents[:, None, None, :]
    scores = jnp.einsum("blhd,bmhd->bhlm", query * weights["slope"][None, None, None], key)
    weighted = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return jnp.einsum("bhlm,bmhd,hde->ble", weighted, value, weights["out"])


def bias(whole, y):
    return y + whole["out"][None, None]


WORK = {"mlp": mlp, "attention": attention}


def half(kind, x, whole, weights, tokens=None, **options):
    """One half of a block, by the op."""
    options |= {"before": norm, "whole": whole, "after": bias, "tokens": tokens}
    return sequence_parallel(x, work=WORK[kind], weights=weights, weight_specs=SPECS[kind], **options)


def written_out(kind, x, whole, weights, tokens=None):
    """The same without the op."""
    given = () if tokens is None else (tokens,)
    return bias(whole, WORK[kind](weights, norm(whole, x), *given))


def with_gradients(function, x, whole, weights, cotangent, *tokens):
    """The result and the gradients of everything, of one array or one shard's part."""
    result, backward = jax.vjp(lambda *given: function(*given, *tokens), x, whole, weights)
    return dict(zip(("result", "x", "whole", "weights"), (result, *backward(cotangent)), strict=True))


def operands(kind):
    tokens = (DOCUMENTS,) if kind == "attention" else ()
    return X, NORM, WEIGHTS[kind], COTANGENT, *tokens


@functools.cache
def wanted(kind):
    return run(functools.partial(with_gradients, functools.partial(written_out, kind)), *operands(kind))


def run(function, *given):
    return jax.tree.map(np.asarray, jax.jit(function).lower(*given).compile(compiler_options=QUICK)(*given))


def check(kind, function, what):
    assert_trees_equal(run(function, *operands(kind)), wanted(kind), what)


CASES = [
    ("mlp", "tensor=2", "gathered"),
    ("mlp", "tensor=8", "parts"),
    ("attention", "data=2,tensor=4", "parts"),
    ("attention", "fsdp=2,tensor=2", "gathered"),
    ("mlp", "data=2,context=2,tensor=2", "gathered"),
    ("mlp", "data=2,expert=2,tensor=2", "gathered"),
]
EVERY = [
    (kind, mesh, keep)
    for kind in WORK
    for mesh in ("tensor=2", "tensor=4", "tensor=8", "data=2,tensor=2", "data=2,tensor=4", "fsdp=4,tensor=2")
    for keep in ("gathered", "parts")
]


@pytest.mark.newest
@pytest.mark.parametrize(("kind", "mesh", "keep"), CASES)
def test_equal_to_one_device(kind, mesh, keep):
    function = functools.partial(half, kind, mesh=make_mesh(mesh), keep=keep)
    with jax.numpy_dtype_promotion("strict"):
        check(kind, functools.partial(with_gradients, function), mesh)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "mesh", "keep"), [case for case in EVERY if case not in CASES])
def test_every_mesh_equals_one_device(kind, mesh, keep):
    function = functools.partial(half, kind, mesh=make_mesh(mesh), keep=keep)
    check(kind, functools.partial(with_gradients, function), mesh)


@pytest.mark.parametrize("mesh", [None, "data=2"])
def test_without_the_axis_nothing_is_divided(mesh):
    function = functools.partial(half, "mlp", mesh=mesh and make_mesh(mesh), keep="parts")
    check("mlp", functools.partial(with_gradients, function), "one shard")


def test_in_the_mesh_in_force_and_made_again_backward():
    with jax.set_mesh(make_mesh("data=2,tensor=4")):
        check("mlp", functools.partial(with_gradients, jax.checkpoint(functools.partial(half, "mlp"))), "checkpoint")


def region(kind, mesh, manual, *, checked, function=half, **options):
    """The op differentiated inside a region manual over some axes, as the explicit lowering and pipelines do."""
    mesh = make_mesh(mesh)
    data, tensor = (axis if axis in manual and axis in mesh.shape else None for axis in ("data", "tensor"))
    own = lambda spec: P(*(axis if axis == tensor else None for axis in spec))  # noqa: E731
    weights = jax.tree.map(own, SPECS[kind], is_leaf=lambda x: isinstance(x, P))
    stream, tokens = P(data, tensor), [P(data)] * (len(operands(kind)) - 4)

    def local(*given):
        found = with_gradients(functools.partial(function, kind, **options), *given)
        if data and not checked:  # a checked region has added up what did not vary
            found |= jax.lax.psum({name: found[name] for name in ("whole", "weights")}, data)
        return found

    return jax.shard_map(
        local,
        mesh=mesh,
        axis_names=manual,
        in_specs=(stream, P(), weights, stream, *tokens),
        out_specs={"result": stream, "x": stream, "whole": P(), "weights": weights},
        check_vma=checked,
    )


@pytest.mark.newest
@pytest.mark.parametrize(
    ("kind", "manual", "checked"),
    [
        ("attention", {"data"}, False),
        ("mlp", {"tensor"}, False),
        ("attention", {"data", "tensor"}, False),
        ("attention", {"data", "tensor"}, True),
    ],
)
def test_inside_a_manual_region(kind, manual, checked):
    check(kind, region(kind, "data=2,tensor=4", manual, checked=checked, keep="parts"), f"{manual}")


def test_under_a_condition_that_differs_between_devices():
    """As in the ticks of a pipeline: the second of two stages does not come to the gather."""
    mesh = make_mesh("stage=2,data=2,tensor=2")

    def idle(x, whole, weights, cotangent):
        return jax.tree.map(jnp.zeros_like, {"result": x, "x": x, "whole": whole, "weights": weights})

    def local(*given):
        compute = functools.partial(with_gradients, functools.partial(half, "mlp"))
        found = jax.lax.cond(jax.lax.axis_index("stage") == 0, compute, idle, *given)
        return jax.lax.psum(found, "stage")

    staged = jax.shard_map(local, mesh=mesh, axis_names={"stage"}, in_specs=P(), out_specs=P(), check_vma=False)
    check("mlp", staged, "stage")


@pytest.mark.parametrize("mesh", ["data=2,tensor=4", "expert=2,tensor=4"])
def test_bfloat16_is_summed_in_float32(mesh):
    """Where another axis stays automatic XLA:CPU would abort on a narrower sum; gathers move what they are given."""
    narrow = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)  # noqa: E731
    function = functools.partial(half, "mlp", mesh=make_mesh(mesh))
    given = narrow((X, NORM, WEIGHTS["mlp"], COTANGENT))
    traced = str(jax.make_jaxpr(functools.partial(with_gradients, function))(*given))
    assert set(re.findall(r":(\w+)\[\S* = all_gather\[", traced)) == {"bf16"}
    assert set(re.findall(r":(\w+)\[\S* = reduce_scatter\[", traced)) == {"f32"}
    found = run(functools.partial(with_gradients, function), *given)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.bfloat16.dtype}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted("mlp")), strict=True):
        assert np.abs(a.astype(np.float32) - b).max() <= 0.05 * np.abs(b).max()


class MLPHalf(nn.Module):
    """A GPT's MLP with its norm, written with the op."""

    config: gpt.Config

    @nn.compact
    def __call__(self, x):
        sizes = {"embed": self.config.embed, "mlp": self.config.mlp}

        def parameter(name, init, *axes):
            return self.param(name, annotate.logical(init, *axes), tuple(sizes[axis] for axis in axes))

        scale, bias, out = (parameter(name, gpt.ONES, "embed") for name in ("scale", "bias", "out"))
        up, down = parameter("up", gpt.MATRIX, "embed", "mlp"), parameter("down", gpt.MATRIX, "mlp", "embed")
        weights = {"up": up, "hidden": parameter("hidden", gpt.ZEROS, "mlp"), "down": down}
        return half("mlp", x, {"scale": scale, "bias": bias, "out": out}, weights, keep="parts")


class Block(nn.Module):
    """A layer of a GPT with that MLP."""

    config: gpt.Config
    deterministic: bool

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        update = gpt.Attention(c, name="attention")(gpt.norm(c, "attention_norm")(x))
        x = annotate.constrain(x + update, "batch", "length", "embed")
        return annotate.constrain(x + MLPHalf(c, name="mlp")(x), "batch", "length", "embed"), None


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": "data=2,tensor=4"},
        {"mesh": "fsdp=2,tensor=4", "lowering": "explicit", "num_microbatches": 2},
        {"mesh": "stage=2,data=2,tensor=2", "num_microbatches": 2},
    ],
)
def test_in_a_model_under_a_plan(monkeypatch, plan):
    """The same model text under the automatic and the explicit lowering and a pipeline."""
    monkeypatch.setattr(gpt, "Block", Block)

    def trained(**plan):
        made, loss, spec = gpt.small(batch=oracle.BATCH, **oracle.SIZES)
        trainer = sl.Trainer(sl.bind(made, loss, sl.Plan(**plan), spec), oracle.OPTIMIZERS["sgd"])
        return oracle.run(trainer, trainer.init(jax.random.key(0)), num_steps=2)

    oracle.assert_equal_to_one_device(trained(**plan), trained(mesh="data=1"))


def placed(spec, leaf, *, mesh):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def programs(keep, mesh):
    """The shapes that forward keeps, and what each of two programs, forward and backward, sends.

    Apart, since XLA:CPU drops the barriers that keep a second gather from being merged with the first.
    """
    mesh = make_mesh(mesh)
    place = functools.partial(placed, mesh=mesh)
    stream = P("data" if "data" in mesh.shape else None, "tensor")
    weights = jax.tree.map(place, SPECS["mlp"], WEIGHTS["mlp"], is_leaf=lambda x: isinstance(x, P))
    given = place(stream, X), jax.tree.map(functools.partial(place, P()), NORM), weights
    forward = jax.jit(functools.partial(jax.vjp, functools.partial(half, "mlp", keep=keep, mesh=mesh)))
    compiled = forward.lower(*given).compile(compiler_options=QUICK)
    _, kept = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(forward, *given),
        compiled.output_shardings,
    )
    places = jax.tree.map(lambda leaf: leaf.sharding, given)
    back = jax.jit(lambda kept, cotangent: kept(cotangent), out_shardings=places)
    backward = back.lower(kept, place(stream, COTANGENT)).compile(compiler_options=QUICK)
    sent = [
        sorted((each.kind, each.operand_bytes, each.bytes_per_device) for each in parse(str(one.as_text())).collectives)
        for one in (compiled, backward)
    ]
    return [leaf.shape for leaf in jax.tree.leaves(kept)], *sent


@pytest.mark.newest
@pytest.mark.parametrize(
    ("mesh", "data", "tensor"), [("tensor=8", 1, 8), ("data=2,tensor=4", 2, 4), ("expert=2,tensor=4", 1, 4)]
)
@pytest.mark.parametrize("keep", ["gathered", "parts"])
def test_one_gather_and_one_scatter_each_way(keep, mesh, data, tensor):
    kept, forward, backward = programs(keep, mesh)
    stream = 4 * BATCH * LENGTH * EMBED // data
    sent = stream * (tensor - 1) / tensor
    gather, scatter = ("all-gather", stream // tensor, sent), ("reduce-scatter", stream, sent)
    assert forward == [gather, scatter]
    assert [each for each in backward if each[0] != "all-reduce"] == [*[gather] * (1 + (keep == "parts")), scatter]
    # Gradients of whole parameters are summed over all devices, those of weights over data alone.
    split = (2 * EMBED * MLP + MLP) // tensor if data > 1 else 0
    assert sum(each[1] for each in backward if each[0] == "all-reduce") == 4 * (3 * EMBED + split)
    # What a region keeps is stacked over its devices: a gathered array counts once for each shard.
    assert ((BATCH * tensor, LENGTH, EMBED) in kept) == (keep == "gathered")


def test_a_norm_gradient_without_the_sum_is_caught(monkeypatch):
    """Negative control: every shard then has the gradient of its own tokens."""
    monkeypatch.setattr(module, "_total", lambda axis, dtype, cotangent: cotangent)
    with pytest.raises(AssertionError, match=r"no sum .*whole"):
        check("mlp", region("mlp", "data=2,tensor=4", {"data", "tensor"}, checked=False), "no sum")


def test_a_last_bias_inside_the_products_is_caught():
    """Negative control of `after`: the sum over shards would count it once for each."""

    def inside(x, whole, weights):
        biased = lambda both, x: bias(both[1], mlp(both[0], x))  # noqa: E731
        given = {"weights": (weights, whole), "weight_specs": (SPECS["mlp"], P()), "before": norm, "whole": whole}
        return sequence_parallel(x, work=biased, mesh=make_mesh("tensor=4"), **given)

    with pytest.raises(AssertionError, match="biased"):
        check("mlp", functools.partial(with_gradients, inside), "biased")


def test_the_last_norm_of_a_region():
    """`summed_gradients`, alone: right in both kinds of region, and the identity outside any."""
    gradient = jax.vjp(lambda whole: norm(whole, X), NORM)[1](COTANGENT)[0]
    for checked in (False, True):

        def local(whole, x, cotangent):
            return jax.vjp(lambda whole: norm(summed_gradients(whole), x), whole)[1](cotangent)[0]

        specs = P(), P(None, "tensor"), P(None, "tensor")
        divided = jax.shard_map(local, mesh=make_mesh("tensor=4"), in_specs=specs, out_specs=P(), check_vma=checked)
        assert_trees_equal(run(divided, NORM, X, COTANGENT), gradient, f"{checked}")
    assert summed_gradients(NORM) is NORM


def test_what_does_not_fit_is_named():
    call = functools.partial(half, "mlp", X, NORM, WEIGHTS["mlp"])
    with pytest.raises(ShardingError, match=r"length 15 is not divisible by tensor=4; fix: pad it to 16 and give the"):
        half("mlp", X[:, :15], NORM, WEIGHTS["mlp"], mesh=make_mesh("tensor=4"))
    with pytest.raises(ShardingError, match="batch 3 is not divisible by data=2; fix: pad it to 4"):
        half("mlp", X[:3], NORM, WEIGHTS["mlp"], mesh=make_mesh("data=2,tensor=4"))
    with pytest.raises(ShardingError) as caught:
        narrow = {name: leaf[..., :30] if name == "up" else leaf[:30] for name, leaf in WEIGHTS["mlp"].items()}
        half("mlp", X, NORM, narrow, mesh=make_mesh("tensor=4"))
    text = str(caught.value)
    for name, shape in (("up", r"[8, 30]"), ("hidden", "[30]"), ("down", "[30, 8]")):
        assert f"weights {name}: {shape} under" in text
    assert "30 is not divisible by tensor=4; fix: use a multiple of 4, such as 32" in text
    with pytest.raises(ShardingError, match=r"no axis 'tensr' in the mesh tensor=4 \(did you mean 'tensor'\?\); fix"):
        call(axis="tensr", mesh=make_mesh("tensor=4"))
    with pytest.raises(ShardingError, match="axis 'tensor' is Explicit; fix: make the mesh with axis_types="):
        call(mesh=make_mesh("tensor=4", axis_type=AxisType.Explicit))
    with pytest.raises(ShardingError, match="axis 'tensor' is named twice; fix: leave it out of"):
        call(batch_axes=("tensor",), mesh=make_mesh("tensor=4"))
    with pytest.raises(ShardingError, match="keep='part'; fix: keep='gathered' or keep='parts'"):
        call(keep="part")
    with pytest.raises(
        ShardingError, match=r"x is int32\[4, 16\]; fix: give a floating array \[batch, length, embed\]"
    ):
        half("mlp", DOCUMENTS, NORM, WEIGHTS["mlp"])
    alone = functools.partial(
        sequence_parallel, jnp.asarray(X), work=mlp, weights=WEIGHTS["mlp"], mesh=make_mesh("tensor=4")
    )
    with pytest.raises(ShardingError, match="no weight is split over tensor=4: each shard would add the same result"):
        alone(weight_specs=P())
    with pytest.raises(ShardingError, match=r"weights down: .* name 'tensor' once, in a spec of at most 2 dims"):
        alone(weight_specs=SPECS["mlp"] | {"down": P("fsdp", None)})
