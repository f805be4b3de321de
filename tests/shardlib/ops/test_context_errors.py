"""Every mistake in a call of context-parallel attention, and the words that name its fix."""

import jax
import jax.numpy as jnp
import pytest

from meshes import make_mesh
from meshes.errors import ShardingError
from shardlib.annotate import attention
from shardlib.ops.context_attention import context_attention

MESH = "context=4,tensor=2"


def call(*, length=16, heads=8, kv_heads=2, keys=None, mesh=MESH, **options):
    """Traces an attention of these sizes; nothing is compiled."""
    query = jax.ShapeDtypeStruct((2, length, heads, 4), jnp.float32)
    key = jax.ShapeDtypeStruct((2, keys or length, kv_heads, 4), jnp.float32)
    options = {"kind": "ring", "axis": "context", "mesh": make_mesh(mesh) if mesh else None} | options
    jax.eval_shape(lambda q, k, v: context_attention(q, k, v, **options), query, key, key)


CASES = {
    "unknown kind": (
        {"kind": "rings"},
        "attention kind 'rings' is unknown (did you mean 'ring'?)\n  fix: use one of ring, all_to_all, gather, hybrid",
    ),
    "no mesh": (
        {"mesh": None},
        "context attention without a mesh\n  fix: pass mesh=, or call it under jax.set_mesh(mesh)",
    ),
    "unknown axis": (
        {"axis": "contxt"},
        "the mesh has no axis 'contxt' (did you mean 'context'?)\n  fix: its axes: ('context', 'tensor')",
    ),
    "hybrid on one axis": (
        {"kind": "hybrid"},
        'hybrid attention over the axes [\'context\']\n  fix: give axis=("ring_axis", "all_to_all_axis")',
    ),
    "ring on two axes": (
        {"axis": ("context", "tensor")},
        "ring attention over the axes ['context', 'tensor']\n  fix: give one axis, axis='context'",
    ),
    "length": (
        {"length": 18},
        "length 18 is not divisible by context=4\n  fix: pad the sequence to length 20 and mask the padding",
    ),
    "zigzag": (
        {"length": 12, "placement": "zigzag"},
        "length 12 over a context axis of 4, placement 'zigzag': not divisible by 8 (two chunks on each of 4 shards)\n"
        '  fix: pad the sequence to length 16 and mask the padding, or use placement="striped"',
    ),
    "rings that do not fill the axis": (
        {"degrees": (2, 1)},
        "degrees [2, 1] are not the sizes of rings that fill context=4\n"
        "  fix: give `Grouping.degrees`, planned with ranks equal to the size of the axis",
    ),
    "rings of nobody knows what": (
        {"degrees": (3, 1)},
        "degrees without segment_ids and positions: which tokens belong together is not known\n"
        "  fix: give those of `shardlib.data.arrange`",
    ),
    "rings for another kind": (
        {"kind": "gather", "degrees": (3, 1)},
        'gather attention with degrees\n  fix: use kind="ring", which falls into smaller ones',
    ),
    "heads": (
        {"kind": "all_to_all", "heads": 6, "kv_heads": 6},
        "all-to-all attention: 6 query heads on a device do not divide over context=4\n"
        '  fix: use kind="ring", which needs no heads to divide, or an all-to-all axis of 2 with a ring axis of 2',
    ),
    "groups": (
        {"heads": 8, "kv_heads": 3},
        "attention cannot take its arguments:\n- 8 query heads are no multiple of 3 KV heads",
    ),
    "heads over an axis": (
        {"heads": 3, "kv_heads": 3, "head_axes": ("tensor",)},
        "3 query heads, 3 KV heads: query heads must be a multiple of the KV heads and divide over 2 shards of heads\n"
        "  fix: leave head_axes out, or use a tensor axis that divides the heads",
    ),
    "batch": (
        {"batch_axes": ("context",), "axis": "tensor"},
        "batch 2 does not divide over 4 shards\n  fix: pad or resize the batch",
    ),
    "window": (
        {"window": 17},
        "window 17 is larger than the length 16: it limits nothing\n"
        "  fix: leave window out, or check which of the two is meant",
    ),
    "no window": (
        {"window": 0},
        "a window of 0 tokens\n  fix: give at least 1: the token itself",
    ),
    "placement without a ring": (
        {"kind": "all_to_all", "placement": "striped"},
        "all-to-all attention without a ring axis computes on whole sequences: placement 'striped' gains nothing\n"
        '  fix: use placement="contiguous"',
    ),
    "mask with rows": (
        {"kind": "all_to_all", "mask": jnp.ones((2, 1, 16, 16), bool)},
        "all-to-all attention: mask [2, 1, 4, 16] has rows; every device would hold all of [length, keys]\n"
        '  fix: give padding as [batch, 1, 1, keys] and documents as segment_ids, or use kind="ring"',
    ),
    "mask": (
        {"mask": jnp.ones((2, 3, 16, 8))},
        "attention cannot take its arguments:\n- mask [2, 3, 16, 8] is not [batch 2 or 1, heads 8 or 1, length 16 or "
        "1, keys 16]\n- mask is float32: give a boolean one, True where a query may attend",
    ),
    "mask without heads": (
        {"mask": jnp.ones((2, 16, 16), bool)},
        "attention cannot take its arguments:\n- mask [2, 16, 16] is not [batch 2 or 1, heads 8 or 1, length 16 or 1, "
        "keys 16]",
    ),
    "labels": (
        {"segment_ids": jnp.ones((1, 16), int), "positions": jnp.ones((4, 16), int)},
        "attention cannot take its arguments:\n- segment_ids [1, 16] are not [batch 2, length 16]\n"
        "- positions [4, 16] are not [batch 2, length 16]",
    ),
    "labels of another kind": (
        {"segment_ids": jnp.ones(16, int), "positions": jnp.ones((2, 16))},
        "attention cannot take its arguments:\n- segment_ids [16] are not [batch 2, length 16]\n"
        "- positions are float32: give integers",
    ),
    "another sequence": (
        {"keys": 32},
        "attention cannot take its arguments:\n- query [2, 16, 8, 4], key [2, 32, 2, 4], value [2, 32, 2, 4]: lengths "
        "must agree. For attention to another sequence, leave the context axis out of its rules",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_messages(name):
    options, message = CASES[name]
    with pytest.raises(ShardingError) as caught:
        call(**options)
    assert str(caught.value) == message


def test_a_window_of_the_whole_length_is_fine():
    call(window=16)
    call(placement="zigzag", head_axes=("tensor",), kv_heads=1)


@pytest.mark.parametrize("options", [{"mask": (4, 16)}, {"segment_ids": (16,)}, {"mask": (2, 3, 1, 16)}])
def test_the_slot_of_any_plan_says_what_does_not_fit(options):
    """On one device and over a context axis alike; a call to another sequence is none of these."""
    x = jnp.ones((2, 16, 8, 4))
    labels = {name: jnp.ones(shape, bool if name == "mask" else int) for name, shape in options.items()}
    with pytest.raises(
        ShardingError, match=r"attention cannot take its arguments:\n- (mask|segment_ids) \[.*\] (is|are) not"
    ):
        attention(x, x, x, **labels)
    assert attention(x, x[:, :5], x[:, :5]).shape == x.shape
