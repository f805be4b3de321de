"""The vocabulary benchmark measures equal losses, holds the formula and reports misses."""

import dataclasses
import io

import pytest
from rich.console import Console

from benchmarks import vocab

CASE = vocab.Case(batch=4, length=16, embed=8, vocab=64, num_chunks=4)
MESH = "data=2,tensor=4"


@pytest.fixture(scope="module")
def found():
    return vocab.measure([MESH], CASE)


def test_the_split_loss_sends_its_formula_and_no_logits(found):
    measured = found[MESH]
    assert measured[vocab.OURS].sent_over_tensor_bytes == vocab.promised_bytes(MESH, CASE)
    logits_bytes = 4 * CASE.batch // 2 * CASE.length * CASE.vocab * 3 / 4
    assert measured["gathered"].sent_bytes["all-gather"] >= logits_bytes
    assert "all-gather" not in measured[vocab.OURS].sent_bytes


def test_the_table_names_every_loss(found):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(vocab.table(found, CASE))
    text = console.export_text()
    assert all(name in text for name in vocab.VARIANTS)


def test_misses_are_reported(found):
    big = dataclasses.replace(found[MESH][vocab.OURS], temp_bytes=10**9, sent_over_tensor_bytes=1.0)
    lines = vocab.missed({MESH: {**found[MESH], vocab.OURS: big}}, CASE)
    assert len(lines) == 2 and "bytes over tensor" in lines[0] and "temporaries of gathered logits" in lines[1]


def test_a_picture_is_drawn(found, tmp_path):
    vocab.plot(found, CASE, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert text.count("<path") > 6
