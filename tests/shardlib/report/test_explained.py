"""Explanations as text: aligned, within the terminal's width, with wide characters, two meshes at any width."""

import dataclasses
import functools

import jax
import pytest
from rich.cells import cell_len

import shardlib as sl
from meshes.shape import MeshShape
from models import gpt
from shardlib.examples.tiny import tiny
from shardlib.explanation import Explanation
from shardlib.report.explained import print_comparison, print_explanation

RULES = sl.Rules.parse(
    ["embed -> fsdp", "mlp -> tensor", "layers -> none"],
    patterns=((".*kernel", ("layers", "embed", "mlp")), (".*", ("embed",))),
)
TREE = {
    "層": {"注意" * 6: {"kernel": jax.ShapeDtypeStruct((4, 64, 256), "float32")}},
    "[bold]odd[/bold]": {"scale": jax.ShapeDtypeStruct((64,), "bfloat16")},
    "a" * 60: {"scale": jax.ShapeDtypeStruct((64,), "float32")},
}


@functools.cache
def explanation(mesh: str) -> Explanation:
    model, loss, spec = tiny()
    whole = sl.bind(model, loss, sl.Plan(mesh="data=2"), spec).explain()
    layers, layer_loss, layer_spec = gpt.small()
    plan = sl.Plan(mesh="stage=3", num_microbatches=4)
    pipeline = sl.bind(layers, layer_loss, plan, layer_spec).explain().pipeline if mesh == "fsdp=8" else None
    return dataclasses.replace(
        whole,
        mesh=MeshShape.parse(mesh),
        parameters=sl.resolve(TREE, RULES, mesh).entries,
        pipeline=pipeline,
        notices=("a notice [red]about[/red] something",),
    )


@pytest.fixture
def terminal(capsys, monkeypatch):
    """Runs a printer on a terminal of so many columns and returns its lines."""

    def lines(printer, *arguments, columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        printer(*arguments)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 130, 160])
@pytest.mark.parametrize("compare", [False, True])
def test_lines_fit_the_terminal(terminal, columns, compare):
    one, other = explanation("fsdp=2,tensor=2"), explanation("fsdp=8")
    lines = terminal(*((print_comparison, one, other) if compare else (print_explanation, other)), columns=columns)
    assert max(map(cell_len, lines)) <= columns
    assert "…" not in "".join(lines)
    assert not any(line.endswith(" ") for line in lines)


def test_markup_in_names_is_text(terminal):
    text = "\n".join(terminal(print_explanation, explanation("fsdp=2"), columns=120))
    assert "[bold]odd[/bold]/scale bfloat16[64] (fsdp), 64 B per device" in text
    assert "notice: a notice [red]about[/red] something" in text


def test_dims_are_aligned(terminal):
    lines = terminal(print_explanation, explanation("fsdp=2,tensor=2"), columns=120)
    start = next(i for i, line in enumerate(lines) if line.startswith("層/"))
    assert lines[start + 1 : start + 4] == [
        "  layers=4  -       replicated by rule 'layers -> none'",
        "  embed=64  fsdp    rule 'embed -> fsdp'",
        "  mlp=256   tensor  rule 'mlp -> tensor'",
    ]


def test_comparison_is_a_table_where_it_fits_and_stacked_where_not(terminal):
    one, other = explanation("fsdp=2,tensor=2"), explanation("fsdp=8")
    wide = terminal(print_comparison, one, other, columns=160)
    narrow = terminal(print_comparison, one, other, columns=80)
    assert any("(-, fsdp, tensor)" in line and "(-, fsdp, -)" in line for line in wide)
    assert "  fsdp=2,tensor=2  (-, fsdp, tensor)   64.0 KiB" in narrow
    assert "  fsdp=8           (-, fsdp, -)        32.0 KiB" in narrow


def test_a_pipeline_has_sentences_and_a_line_per_stage(terminal):
    lines = terminal(print_explanation, explanation("fsdp=8"), columns=160)
    start = lines.index("pipeline")
    assert lines[start + 1].startswith("cut at            a scan of 4 steps over layers/attention/key/kernel, ")
    stages = [line.split() for line in lines[start:] if line.lstrip()[:1].isdecimal()]
    assert [stage[:3] for stage in stages] == [["0", "0-1", "2.00"], ["1", "2", "1.00"], ["2", "3", "1.14"]]
