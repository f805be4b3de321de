"""The kernels of targets mean what the reference means; where they cannot, the reference runs and says why.

The TPU kernel runs interpreted here; that the TPU compiler takes it is in test_tpu_attention. There is no GPU: how
cuDNN's op is called can be seen in the lowered program, and that is all that is checked of it.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.build import make_mesh
from shardlib.annotate import reference_attention
from shardlib.ops import attention as slot
from shardlib.ops.attention import sharded_heads_attention
from shardlib.ops.fused_attention import KERNELS, call_refusal, fused_attention, platform_of, refusal
from tests.oracle import assert_trees_equal

LENGTH = 256


def operands(*, heads=2, kv_heads=1, head_dim=128, length=LENGTH, batch=2, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, length, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def results(attention, query, key, value, out, **labels):
    """The attention and its gradients against the cotangent `out`."""

    def function(query, key, value):
        result = attention(query, key, value, **labels)
        return (result * out).sum(), result

    gradients = jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)
    (_, result), found = jax.jit(gradients)(query, key, value)
    return {"out": result, **dict(zip(("query", "key", "value"), found, strict=True))}


def interpreted(mesh="data=1", **options):
    return functools.partial(
        fused_attention, platform="tpu", mesh=make_mesh(mesh, devices="cpu"), interpret=True, **options
    )


DOCUMENTS = np.repeat([[1, 2, 3], [1, 1, 2]], [100, 60, 96], axis=1)
PADDED = (np.arange(LENGTH) < np.array([[200], [256]]))[:, None, None, :]
CASES = {
    "window both ways": ({}, {"window": 40}),
    "padded, packed, causal": ({"heads": 4}, {"causal": True, "segment_ids": DOCUMENTS, "mask": PADDED}),
}
MORE = {
    "full, one head each": ({"kv_heads": 2}, {}),
    "causal": ({"heads": 4, "kv_heads": 2}, {"causal": True}),
    "causal window": ({}, {"causal": True, "window": 100}),
    "packed": ({}, {"segment_ids": DOCUMENTS}),
    "tiles of 512": ({"length": 1024}, {"causal": True, "window": 300}),
}


def check(name, attention, sizes, options):
    static = {key: value for key, value in options.items() if not isinstance(value, np.ndarray)}
    labels = {key: jnp.asarray(value) for key, value in options.items() if key not in static}
    given = operands(**sizes)
    found = results(functools.partial(attention, **static), *given, **labels)
    wanted = results(functools.partial(reference_attention, **static), *given, **labels)
    assert_trees_equal(found, wanted, name)


@pytest.mark.parametrize("name", CASES)
def test_the_tpu_kernel_is_the_reference(name):
    check(name, interpreted(), *CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_the_tpu_kernel_is_the_reference_everywhere(name):
    check(name, interpreted(), *MORE[name])


def test_each_device_runs_the_kernel_on_its_rows_and_heads():
    """Grouped queries, each KV head with its group on one device."""
    divided = interpreted("data=2,tensor=2", batch_axes=("data",), head_axes=("tensor",))
    check("data=2,tensor=2", divided, {"heads": 4, "kv_heads": 2}, {"causal": True})


def test_a_kernel_whose_window_is_one_short_is_caught():
    query, key, value, _ = operands()
    found = jax.jit(interpreted(causal=True, window=39))(query, key, value)
    with pytest.raises(AssertionError, match="differs"):
        assert_trees_equal(found, reference_attention(query, key, value, causal=True, window=40), "window")


def test_a_region_around_it_keeps_its_axes():
    """Manual over data outside, as in a pipeline; tensor becomes manual inside."""
    mesh = make_mesh("data=2,tensor=2", devices="cpu")
    inner = functools.partial(
        fused_attention, platform="tpu", interpret=True, batch_axes=("data",), head_axes=("tensor",), causal=True
    )
    rows = jax.sharding.PartitionSpec("data")
    region = jax.shard_map(inner, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False)
    query, key, value, _ = operands(heads=4, kv_heads=2)
    found = jax.jit(region)(query, key, value)
    assert_trees_equal(found, reference_attention(query, key, value, causal=True), "nested")


# What is refused, and what runs then

SHAPES = {"query": (2, 256, 4, 128), "key": (2, 256, 2, 128), "value": (2, 256, 2, 128), "dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    ("platform", "changes", "words"),
    [
        ("tpu", {"query": (2, 256, 4, 64)}, "heads of a multiple of 128, and head_dim is 64"),
        ("tpu", {"query": (2, 192, 4, 128)}, "multiple of 128, and the length is 192"),
        ("tpu", {"key": (2, 64, 2, 128)}, "the number of keys is 64"),
        ("tpu", {"dtype": jnp.float16}, "splash attention takes bfloat16 and float32, and queries are float16"),
        ("tpu", {"mask": (2, 1, 256, 256)}, r"takes masks of keys .* say causal=, window= or segment_ids= instead"),
        ("gpu", {"dtype": jnp.float32}, "cuDNN takes bfloat16 and float16, and queries are float32"),
        ("gpu", {"query": (2, 256, 4, 192)}, "heads of a multiple of 8 up to 128, and head_dim is 192"),
        ("gpu", {"value": (2, 256, 2, 64)}, "head_dim is 128 and 64"),
        ("gpu", {"window": 8}, "a window only when causal"),
        ("gpu", {"key": (2, 255, 2, 128)}, "even lengths, and there are 256 queries and 255 keys"),
        ("cpu", {}, "no kernel for cpu"),
        (None, {}, "no kernel for a mesh without devices"),
    ],
)
def test_what_does_not_fit_says_why(platform, changes, words):
    assert platform not in KERNELS or refusal(platform, **SHAPES) is None
    found = refusal(platform, **{**SHAPES, **changes})
    assert found is not None and re.search(words, found)


def op(platform):
    mesh = make_mesh("data=2,tensor=4", devices="cpu")
    axes = (("data",), ("tensor",))
    return sharded_heads_attention(lambda shape: axes, lambda x, names: x, mesh=mesh, platform=platform, manual=False)


def test_the_slot_takes_the_kernel_where_it_fits(monkeypatch):
    """Fewer KV heads than shards: each shard gets a copy of its own."""
    monkeypatch.setattr(slot, "fused_attention", functools.partial(fused_attention, interpret=True))
    query, key, value, _ = operands(heads=4, kv_heads=2)
    wanted = reference_attention(query, key, value, causal=True)
    for platform, kernels in (("tpu", 1), ("cpu", 0), (None, 0)):
        function = functools.partial(op(platform), causal=True)
        assert str(jax.make_jaxpr(function)(query, key, value)).count("pallas_call[") == kernels, platform
        assert_trees_equal(jax.jit(function)(query, key, value), wanted, str(platform))
    small = operands(heads=4, head_dim=64)[:3]
    assert "pallas_call" not in str(jax.make_jaxpr(op("tpu"))(*small))


def test_the_platform_is_the_mesh_s():
    mesh = make_mesh("data=8", devices="cpu")
    assert platform_of(mesh) == "cpu" == platform_of(mesh.abstract_mesh)
    assert platform_of(jax.sharding.AbstractMesh((8,), ("data",))) is None
    device = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu")
    assert platform_of(jax.sharding.AbstractMesh((8,), ("data",), abstract_device=device)) == "tpu"
    with jax.set_mesh(mesh):
        assert platform_of(None) == "cpu"


# cuDNN, as far as it goes without a GPU


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "window": 64}, {"segment_ids": DOCUMENTS}, {"mask": PADDED, "causal": True}],
)
def test_cudnn_is_called_for_cuda(options, monkeypatch):
    """Tracing asks the CUDA plugin, which is not here, for cuDNN's version: that answer alone is made up."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    given = operands(heads=4, kv_heads=2, dtype=jnp.bfloat16)
    static = {key: value for key, value in options.items() if not isinstance(value, np.ndarray)}
    labels = {key: jnp.asarray(value) for key, value in options.items() if key not in static}
    assert call_refusal("gpu", *given[:3], **options) is None
    mesh = make_mesh("data=2,tensor=2", devices="cpu")
    axes = {"batch_axes": ("data",), "head_axes": ("tensor",)}
    attention = functools.partial(fused_attention, platform="gpu", mesh=mesh, **axes, **static)

    def gradients(query, key, value, out, labels):
        return jax.grad(lambda *x: (attention(*x, **labels) * out).sum(), argnums=(0, 1, 2))(query, key, value)

    text = jax.jit(gradients).trace(*given, labels).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text and "Backward" in text
