"""Documents packed into blocks: every token once, every target its own document's, ranks alike, little padding."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.data.packing import pack, pieces_of


def documents(lengths):
    """Documents whose tokens are all different."""
    starts = np.cumsum([1, *lengths[:-1]])
    return [np.arange(start, start + size) for start, size in zip(starts, lengths, strict=True)]


def whole(batches):
    """The rows of all batches, one array per name."""
    batches = list(batches)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    length=st.integers(1, 12),
    rows=st.integers(1, 3),
    ranks=st.integers(1, 4),
    pool=st.integers(1, 50),
    seed=st.integers(0, 2**40),
)
def test_every_token_and_every_target_once(lengths, length, rows, ranks, pool, seed):
    given_documents = documents(lengths)
    found = whole(pack(given_documents, length=length, batch=rows * ranks, ranks=ranks, pool=pool, seed=seed))
    real = found["segment_ids"] > 0
    assert sorted(found["inputs"][real]) == list(range(1, sum(lengths) + 1))
    assert not found["inputs"][~real].any()
    assert not found["weights"][~real].any()
    pairs = {(a, b) for a, b, w in zip(*(found[name].ravel() for name in ("inputs", "targets", "weights"))) if w}
    assert pairs == {(a, a + 1) for document in given_documents for a in document[:-1]}
    assert len(pairs) == found["weights"].sum()
    assert not found["targets"][found["weights"] == 0].any()


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), length=st.integers(2, 12))
def test_segments_are_runs_of_one_document_and_positions_count_them(lengths, length):
    found = whole(pack(documents(lengths), length=length, batch=2))
    for ids, positions, inputs in zip(found["segment_ids"], found["positions"], found["inputs"], strict=True):
        runs = [np.flatnonzero(ids == number) for number in range(1, ids.max() + 1)]
        assert np.concatenate([*runs, np.flatnonzero(ids == 0)]).tolist() == list(range(length))
        for run in runs:
            assert positions[run].tolist() == list(range(len(run)))
            assert (np.diff(inputs[run]) == 1).all()
        assert not positions[ids == 0].any()


def test_a_block_written_out():
    (batch,) = pack([np.array([5, 6, 7]), np.array([8, 9])], length=6, batch=1, pool=2, seed=1)
    rows = {name: leaf[0].tolist() for name, leaf in batch.items()}
    first_is_long = rows["inputs"][0] == 5
    assert rows["inputs"] == ([5, 6, 7, 8, 9, 0] if first_is_long else [8, 9, 5, 6, 7, 0])
    assert rows["targets"] == ([6, 7, 0, 9, 0, 0] if first_is_long else [9, 0, 6, 7, 0, 0])
    assert rows["weights"] == ([1, 1, 0, 1, 0, 0] if first_is_long else [1, 0, 1, 1, 0, 0])
    assert rows["segment_ids"] == ([1, 1, 1, 2, 2, 0] if first_is_long else [1, 1, 2, 2, 2, 0])
    assert rows["positions"] == ([0, 1, 2, 0, 1, 0] if first_is_long else [0, 1, 0, 1, 2, 0])
    assert {name: leaf.dtype for name, leaf in batch.items()} == {
        "inputs": np.int32,
        "targets": np.int32,
        "segment_ids": np.int32,
        "positions": np.int32,
        "weights": np.float32,
    }


def test_a_cut_costs_no_target():
    pieces = pieces_of(np.arange(7), length=3)
    assert [piece.inputs.tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [piece.following.tolist() for piece in pieces] == [[1, 2, 3], [4, 5, 6], []]


def test_ranks_have_equal_rows_and_empty_ones_are_spread():
    """Nine full blocks in a batch of sixteen for eight ranks: one rank has two, none has fewer than one."""
    (batch,) = pack(documents([4] * 9), length=4, batch=16, ranks=8)
    real = (batch["segment_ids"].reshape(8, 2, 4) > 0).any(axis=2).sum(axis=1)
    assert sorted(real) == [1] * 7 + [2]


def test_work_is_dealt_evenly():
    """One long document attends over 64 pairs, four short ones over 16: each rank gets one block of either kind."""
    (batch,) = pack(documents([8, 8, *[2] * 8]), length=8, batch=4, ranks=2)
    documents_of = batch["segment_ids"].reshape(2, 2, 8).max(axis=2)
    assert sorted(documents_of[0]) == sorted(documents_of[1]) == [1, 4]


def test_the_same_arguments_give_the_same_batches_and_another_seed_others():
    lengths = np.random.RandomState(0).randint(1, 30, 200).tolist()
    first, again, other = (whole(pack(documents(lengths), length=32, batch=4, seed=seed)) for seed in (7, 7, 8))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["inputs"], other["inputs"])


def test_documents_are_read_as_they_are_needed():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield np.arange(5)

    next(pack(endless(), length=10, batch=4, pool=16))
    assert len(read) <= 16 + 4 * 2


@pytest.mark.parametrize(
    ("given_documents", "options", "says"),
    [
        ([], {"batch": 6, "ranks": 4}, "batch=6 blocks do not divide over 4 ranks; fix: batch=8"),
        ([], {"length": 0}, "length=0 is not positive"),
        ([], {"seed": -1}, "seed=-1 is negative"),
        ([np.arange(3), np.zeros(0, int)], {}, "document 1 is int64 [0]"),
        ([np.ones((2, 2), int)], {}, "document 0 is int64 [2, 2], and packing takes rows of integers"),
        ([np.ones(3)], {}, "fix: give each document as integers [tokens]"),
    ],
)
def test_errors(given_documents, options, says):
    with pytest.raises(ShardingError) as caught:
        list(pack(given_documents, **{"length": 8, "batch": 2, **options}))
    assert says in str(caught.value)


def test_sizes_are_checked_before_the_first_batch():
    with pytest.raises(ShardingError, match="ranks"):
        pack([], length=8, batch=3, ranks=2)


def test_no_jax_is_loaded():
    code = "import sys, shardlib.data.packing, shardlib.data.length_groups; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
