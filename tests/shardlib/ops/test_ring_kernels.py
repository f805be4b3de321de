"""A ring whose blocks are computed by the TPU kernel, interpreted: the result and the gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.build import make_mesh
from shardlib.annotate import reference_attention
from shardlib.ops import ring_attention as ring
from shardlib.ops import ring_kernels
from shardlib.ops.context_attention import context_attention
from shardlib.ops.context_layout import order
from shardlib.ops.fused_attention import fused_attention, splash_kernel
from shardlib.ops.online_softmax import merged
from tests.oracle import assert_trees_equal
from tests.shardlib.ops.test_fused_attention import operands, results

LENGTH = 512


@pytest.fixture
def interpreted(monkeypatch):
    """The CPU counts as a TPU, whose kernels run interpreted."""
    monkeypatch.setattr(ring, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(ring, "fused_attention", functools.partial(fused_attention, interpret=True))
    monkeypatch.setattr(ring_kernels, "splash_kernel", functools.partial(splash_kernel, interpret=True))


def check(
    *,
    context,
    kind="ring",
    placement="contiguous",
    causal=True,
    segments=False,
    kv_heads=1,
    heads=2,
    dtype=None,
    length=LENGTH,
):
    """Against the float32 reference on one device; tokens in the order of the placement."""
    mesh = make_mesh(f"data=2,context={context}", devices="cpu")
    given = [x.astype(dtype or x.dtype) for x in operands(length=length, heads=heads, kv_heads=kv_heads)]
    ids = np.repeat([[1, 2, 3], [1, 2, 2]], [100, 250, length - 350], axis=1)
    labels = {"segment_ids": jnp.asarray(ids)} if segments else {}
    where = order(length, shards=context, placement=placement)
    back = np.argsort(where)
    attention = functools.partial(
        context_attention,
        kind=kind,
        axis="context",
        placement=placement,
        causal=causal,
        mesh=mesh,
        batch_axes=("data",),
    )

    def reordered(query, key, value, **labels):
        moved = [x[:, where] for x in (query, key, value)]
        return attention(*moved, **{name: x[:, where] for name, x in labels.items()})[:, back]

    exact = [x.astype(jnp.float32) for x in given]
    wanted = results(functools.partial(reference_attention, causal=causal), *exact, **labels)
    found, what = results(reordered, *given, **labels), f"{kind} {placement} {context}"
    if dtype is None:
        assert_trees_equal(found, wanted, what)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Weights, products and results are rounded to 8 bits of mantissa once each.
        assert np.abs(np.asarray(a, np.float32) - b).max() <= 3 * 2**-8 * np.abs(b).max(), what
    text = str(jax.make_jaxpr(functools.partial(attention, **labels))(*given[:3]))
    return text.count("pallas_call[")


def test_zigzag_blocks_of_packed_documents(interpreted):
    assert check(context=2, placement="zigzag", segments=True) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"context": 4},
        {"context": 4, "segments": True, "heads": 4, "kv_heads": 2},
        {"context": 4, "causal": False, "segments": True},
        {"context": 4, "causal": False, "placement": "striped"},
        {"context": 2, "placement": "zigzag", "heads": 4, "kv_heads": 2},
        {"context": 2, "kind": "all_to_all", "heads": 4, "kv_heads": 2},
        # Two blocks of the ring are a loop, in which it is not known where they come from.
        {"context": 4, "placement": "zigzag", "segments": True, "length": 1024},
        {"context": 4, "dtype": "bfloat16", "heads": 4, "kv_heads": 2},
    ],
)
def test_blocks_everywhere(interpreted, options):
    assert check(**options) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"context": 4, "placement": "zigzag"}, {"context": 4, "placement": "striped"}])
def test_blocks_that_do_not_fit_run_the_online_softmax(interpreted, options):
    assert check(**options) == 0


@pytest.mark.exhaustive
def test_blocks_merged_without_their_denominators_are_caught(interpreted, monkeypatch):
    monkeypatch.setattr(ring_kernels, "merged", lambda state, out, log_weight: merged(state, out, 0 * log_weight))
    with pytest.raises(AssertionError, match="differs"):
        check(context=2)


SHAPES = {"query": (2, 512, 4, 128), "key": (2, 512, 2, 128), "value": (2, 512, 2, 128), "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 8}, "a window of a block depends on where it comes from"),
        ({"has_mask": True}, "a mask of a block"),
        ({"has_positions": True}, "given positions of a block"),
        ({"placement": "striped"}, "a striped block"),
        ({"query": (2, 384, 4, 128)}, "half a zigzag shard of 384 tokens is no multiple of 128"),
        ({"dtype": "float16"}, "splash attention takes bfloat16 and float32"),
        ({"platform": "gpu"}, "JAX differentiates cuDNN's attention only where the softmax ends with the block"),
        ({"platform": "cpu"}, "no kernel for cpu"),
    ],
)
def test_what_does_not_fit_says_why(changes, words):
    fitting = {"platform": "tpu", "placement": "zigzag", "causal": True, "window": None, **SHAPES}
    assert ring_kernels.refusal(**fitting) is None
    assert words in (ring_kernels.refusal(**{**fitting, **changes}) or "")
