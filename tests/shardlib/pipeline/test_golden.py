"""Small tables as a person would draw them: golden/*.csv, one column per unit of time at F=I=W=1, blank where idle.

Rewrite them with `python -m tests.shardlib.pipeline.test_golden` and read the difference.
"""

import re
from fractions import Fraction
from pathlib import Path

import pytest

from shardlib.pipeline.schedules import build, named
from shardlib.pipeline.simulate import simulate
from shardlib.pipeline.table import Table

GOLDEN = Path(__file__).parent / "golden"
# What the paper's figure shows at the same size; microbatches count from 0 here and from 1 there.
FIGURES = {
    "gpipe": (4, 4, "arXiv 1811.06965, figure 2c: all forwards before all backwards"),
    "1f1b": (4, 8, "arXiv 2104.04473, figure 4, top: 4, 3, 2, 1 forwards before the first backward"),
    "interleaved_1f1b": (4, 8, "arXiv 2104.04473, figure 4, bottom: groups of 4 through chunk 0, then chunk 1"),
    "zb_h1": (4, 8, "arXiv 2401.10241, figure 2: 1F1B's warm-up, W in the gaps, 3 idle units per rank"),
    "zb_h2": (4, 8, "arXiv 2401.10241, figure 3: 7, 5, 3, 1 forwards before the first I, a parallelogram"),
    "zb_v": (4, 8, "arXiv 2405.15362: a parallelogram on the V, 7 forwards of chunk 0 before the first of chunk 1"),
    "v_half": (4, 8, "arXiv 2405.15362: at most 3 microbatches alive on a rank"),
    "v_min": (4, 8, "arXiv 2405.15362: at most 2 microbatches alive on a rank"),
    "dualpipe_v": (4, 8, "DualPipe README, one half of the figure: a diamond of F and B pairs"),
}


def timed_csv(name):
    """A table with idle time as blank cells; an action of several units is followed by blanks."""
    stages, microbatches, figure = FIGURES[name]
    table = build(name, stages=stages, microbatches=microbatches)
    simulation = simulate(table)
    unit = Fraction(1, table.num_chunks)
    lines = [f"# schedule={name} placement={table.placement}", f"# {figure}"]
    for row, spans in zip(table.rows, simulation.spans):
        cells = [""] * int(simulation.makespan / unit)
        for cell, (start, _) in zip(row, spans):
            assert (Fraction(start) / unit).denominator == 1, "every action starts on a whole unit"
            cells[int(Fraction(start) / unit)] = str(cell)
        width = max(len(str(cell)) for cell in row)
        lines.append(",".join(cell.ljust(width) for cell in cells).rstrip(", "))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", FIGURES)
def test_golden_tables(name):
    text = (GOLDEN / f"{name}.csv").read_text(encoding="utf-8")
    assert text == timed_csv(name)
    stages, microbatches, _ = FIGURES[name]
    assert Table.parse(text) == build(name, stages=stages, microbatches=microbatches)


def order(name, rank, *, kinds="FBIW"):
    """A golden row read back by hand: the actions in order, without this library's parser."""
    lines = [line for line in (GOLDEN / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]
    return [cell.strip() for cell in lines[rank].split(",") if cell.strip()[:1] in kinds and cell.strip()]


def warm_up(name, rank):
    """Forwards before the first backward."""
    return next(number for number, cell in enumerate(order(name, rank)) if cell[0] in "BI")


def columns(name):
    lines = [line for line in (GOLDEN / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]
    return [[cell.strip() for cell in line.split(",")] for line in lines]


def test_what_the_papers_figures_show():
    """Facts read off the figures, checked on the files rather than on the code that made them."""
    assert [warm_up("gpipe", rank) for rank in range(4)] == [4, 4, 4, 4]
    assert [warm_up("1f1b", rank) for rank in range(4)] == [4, 3, 2, 1]
    assert " ".join(order("1f1b", 0)) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert " ".join(order("1f1b", 3)) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    assert order("interleaved_1f1b", 0)[:9] == ["F0", "F1", "F2", "F3", "F0.1", "F1.1", "F2.1", "F3.1", "F4"]
    assert [warm_up("interleaved_1f1b", rank) for rank in range(4)] == [11, 9, 7, 5]
    assert [warm_up("zb_h1", rank) for rank in range(4)] == [4, 3, 2, 1]
    assert order("zb_h1", 0)[4:10] == ["I0", "W0", "F4", "I1", "W1", "F5"]
    assert [warm_up("zb_h2", rank) for rank in range(4)] == [7, 5, 3, 1]
    for name, per_rank in (("zb_h2", 24), ("zb_v", 48)):
        for rank, row in enumerate(columns(name)):
            start = next(number for number, cell in enumerate(row) if cell)
            assert start == rank and "" not in row[start:] and len(row) - start == per_rank, "a parallelogram"
    assert [len(row) - sum(map(bool, row)) for row in columns("zb_h1")][3] == 3
    assert order("zb_v", 0)[:8] == ["F0", "F1", "F2", "F3", "F4", "F5", "F6", "F0.1"]


@pytest.mark.parametrize(("name", "alive"), [("v_half", 6), ("v_min", 4), ("zb_v", 8), ("zb_h1", 4), ("zb_h2", 7)])
def test_chunks_alive_in_the_files(name, alive):
    for rank in range(4):
        now = most = 0
        for cell in order(name, rank):
            now += {"F": 1, "W": -1}.get(cell[0], 0)
            most = max(most, now)
        assert most <= alive


def test_files_are_readable():
    for path in GOLDEN.glob("*.csv"):
        for line in path.read_text().splitlines()[2:]:
            assert re.fullmatch(r"( *([FBIW]\d(\.1)?)? *,?)+", line)
    assert {path.stem for path in GOLDEN.glob("*.csv")} == set(FIGURES)
    assert all(named(name) for name in FIGURES)


if __name__ == "__main__":
    for schedule in FIGURES:
        (GOLDEN / f"{schedule}.csv").write_text(timed_csv(schedule), encoding="utf-8")
