"""The context benchmark sends its formulas, balances zigzag, reports misses and says what a picture needs."""

import builtins
import dataclasses
import io

import pytest
from rich.console import Console

from benchmarks import context

CASE = context.Case(lengths=(32,), timed_length=32, kv_heads=4, head_dim=4, rounds=1)


@pytest.fixture(scope="module")
def found():
    return context.measure(CASE)


STEP = context.Step(context=25, one_device=100, one_device_tiled=100)


def test_every_kind_sends_its_formula(found):
    assert context.missed(found, STEP, CASE) == []
    assert found["all-to-all"].sent_bytes < found["zigzag ring"].sent_bytes == found["contiguous ring"].sent_bytes


def test_zigzag_balances_the_work(found):
    assert found["zigzag ring"].balance == 1.0
    assert found["contiguous ring"].balance == pytest.approx(7 / 4, rel=0.05)
    assert found["zigzag ring"].scores == 8 * 32 * 33 // 2 // 4


def test_tables_name_every_kind(found):
    console = Console(width=250, record=True, file=io.StringIO())
    for shown in context.tables(found, STEP, CASE):
        console.print(shown)
    text = console.export_text()
    assert all(name in text for name in (*context.KINDS, "one device tiled", "1.000"))


def test_misses_are_reported(found):
    wrong = {**found, "all-gather": dataclasses.replace(found["all-gather"], sent_bytes=1.0)}
    lines = context.missed(wrong, dataclasses.replace(STEP, context=50), CASE)
    assert (
        "all-gather: sends 1 bytes, not" in lines[0] and "activations are 2.00/4 of one device's, above 1.1" in lines[1]
    )


def test_a_picture_without_matplotlib_names_the_extra(found, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"--plot needs matplotlib: pip install 'shardlib\[report\]'"):
        context.plot(found, CASE, tmp_path / "picture.png")


@pytest.mark.exhaustive
def test_it_runs(capfd):
    assert context.main(["--quick"]) == 0
    assert "train step of a Llama" in capfd.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optimized")
def test_activations_of_32k_tokens_are_divided():
    case = context.Case()
    alone = context.activations(case, tiled=True, mesh="data=1")
    assert context.activations(case, mesh="context=4", attention="ring") <= context.MAX_SHARE / 4 * alone
    # Negative control: half of the devices hold twice as much.
    assert context.activations(case, mesh="context=2", attention="ring") > context.MAX_SHARE / 4 * alone
