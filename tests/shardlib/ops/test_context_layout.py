"""Placements of a sequence over shards: permutations, their inverses, batches, labels, and what a window needs."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from meshes.errors import ShardingError
from shardlib.ops.context_layout import (
    PLACEMENTS,
    check_segment_ids,
    document_positions,
    inverse,
    needed_shifts,
    next_tokens,
    order,
    reorder,
    restore,
)

SIZES = list(itertools.product([8, 16, 48], [1, 2, 4], PLACEMENTS))


@pytest.mark.parametrize("length, shards, placement", SIZES)
def test_an_order_is_a_permutation_and_has_an_inverse(length, shards, placement):
    stored = order(length, shards=shards, placement=placement)
    assert sorted(stored) == list(range(length))
    assert (stored[inverse(stored)] == np.arange(length)).all()
    assert (np.diff(stored.reshape(shards, -1)) > 0).all()  # ascending on every shard, which tiles rely on to skip


@pytest.mark.parametrize(
    "placement, wanted",
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_what_two_shards_hold(placement, wanted):
    assert order(8, shards=2, placement=placement).reshape(2, 4).tolist() == wanted


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_causal_work_of_shards(placement):
    """Query i scores i + 1 keys: zigzag is equal, striped within one key a query, contiguous up to 2c - 1 fold."""
    work = (order(64, shards=4, placement=placement).reshape(4, 16) + 1).sum(axis=1)
    spread = {"contiguous": 6, "zigzag": 1, "striped": 1.05}[placement]
    assert work.max() / work.min() == pytest.approx(spread, rel=0.2 if placement == "contiguous" else 0.05)


def test_documents_are_spread_one_by_one():
    stored = order(16, shards=2, placement="zigzag", document_lengths=(4, 12))
    assert stored.reshape(2, 8).tolist() == [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]]


def test_batches_there_and_back():
    axes = {
        "inputs": ("batch", "length"),
        "positions": (None, "batch", "length"),
        "mask": ("batch", None, "length", "keys"),
        "padding": ("batch", None, None, "keys"),
        "row": ("batch",),
    }
    shapes = {"inputs": (2, 8), "positions": (3, 2, 8), "mask": (2, 1, 8, 8), "padding": (2, 1, 1, 8), "row": (2,)}
    batch = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    moved = reorder(batch, axes=axes, shards=2, placement="zigzag")
    stored = [0, 1, 6, 7, 2, 3, 4, 5]
    assert moved["inputs"][1].tolist() == [8 + position for position in stored]
    assert (moved["mask"][0, 0] == batch["mask"][0, 0][np.ix_(stored, stored)]).all()
    assert (moved["row"] == batch["row"]).all()
    back = restore(moved, axes=axes, shards=2, placement="zigzag")
    assert all((back[name] == batch[name]).all() for name in batch)


def test_targets_cross_shards_but_not_documents():
    tokens = np.arange(1, 9)[None]
    targets, weights = next_tokens(tokens, segment_ids=np.array([[1, 1, 1, 2, 2, 2, 3, 3]]))
    assert targets.tolist() == [[2, 3, 0, 5, 6, 0, 8, 0]]
    assert weights.tolist() == [[1, 1, 0, 1, 1, 0, 1, 0]]


def test_positions_restart_in_documents():
    ids = np.array([[1, 1, 1, 2, 3, 3], [7, 7, 7, 7, 7, 0]])
    assert document_positions(ids).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize("length, shards, placement", [size for size in SIZES if size[1] > 1])
@pytest.mark.parametrize("causal", [True, False])
def test_shifts_cover_every_pair_that_a_window_allows(length, shards, placement, causal):
    stored = order(length, shards=shards, placement=placement).reshape(shards, -1)
    for window in (1, 2, length // shards, length // shards + 2, length):
        sees = np.abs(stored[:, :, None, None] - stored[None, None]) < window
        sees &= (stored[:, :, None, None] >= stored[None, None]) | (not causal)
        pairs = sees.any(axis=(1, 3))
        wanted = {int((i - j) % shards) for i, j in zip(*np.nonzero(pairs), strict=True)}
        found = needed_shifts(length=length, shards=shards, placement=placement, causal=causal, window=window)
        assert set(found) >= wanted
        assert set(found) == wanted or placement == "striped"
        assert found[0] == 0


def test_a_causal_window_needs_the_nearest_shards():
    found = needed_shifts(length=64, shards=8, placement="contiguous", causal=True, window=9)
    assert found == (0, 1)
    assert needed_shifts(length=64, shards=8, placement="contiguous", causal=True, window=10) == (0, 1, 2)
    assert needed_shifts(length=64, shards=8, placement="contiguous", causal=False, window=9) == (0, 1, 7)


def test_placements_need_no_jax():
    program = "import sys, shardlib.ops.context_layout; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: order(10, shards=4, placement="contiguous"),
            "length 10 over a context axis of 4, placement 'contiguous': not divisible by 4\n"
            "  fix: pad the sequence to length 12 and mask the padding",
        ),
        (
            lambda: order(12, shards=4, placement="zigzag"),
            "length 12 over a context axis of 4, placement 'zigzag': not divisible by 8 (two chunks on each of 4 "
            'shards)\n  fix: pad the sequence to length 16 and mask the padding, or use placement="striped"',
        ),
        (
            lambda: order(8, shards=2, placement="zigzg"),
            "placement 'zigzg' is unknown (did you mean 'zigzag'?)\n  fix: use one of contiguous, zigzag, striped",
        ),
        (
            lambda: order(16, shards=2, placement="zigzag", document_lengths=(4, 8)),
            "document_lengths [4, 8] sum to 12, the length is 16\n"
            "  fix: give the padding as a last document of 4 tokens",
        ),
        (
            lambda: check_segment_ids(np.array([[1, 1, 2], [3, 4, 3]])),
            "segment_ids out of order in row 1: id 3 starts at token 0 and again at token 2, so two documents would "
            "attend to each other\n  fix: number the documents of a row 1, 2, 3, ... and check before the batch is "
            "reordered",
        ),
        (
            lambda: check_segment_ids(np.ones((2, 3))),
            "segment_ids are float64 [2, 3]\n  fix: give integers [batch, length]",
        ),
        (
            lambda: reorder({"x": np.ones((2, 8)), "y": np.ones(2)}, axes={"x": ("batch",)}, shards=2, placement="x"),
            "a batch to reorder over a context axis:\n- x [2, 8] has 1 axes ('batch',)\n"
            "- y [2] has no axes: name its dims, as in ('batch', 'length')",
        ),
        (
            lambda: reorder(
                {"x": np.ones((2, 8)), "y": np.ones((2, 4))},
                axes={"x": ("batch", "length"), "y": ("batch", "length")},
                shards=2,
                placement="zigzag",
            ),
            "a batch to reorder over a context axis:\n- lengths differ: 4 in y, 8 in x",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ShardingError) as caught:
        call()
    assert str(caught.value) == message


def test_segment_ids_are_checked_before_a_batch_is_reordered():
    batch = {"segment_ids": np.array([[1, 2, 1, 2]])}
    with pytest.raises(ShardingError, match="out of order"):
        reorder(batch, axes={"segment_ids": ("batch", "length")}, shards=2, placement="striped")
