"""`shardlib schedule`: output, files, exit statuses, errors as a stranger reads them."""

import contextlib
import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from dataclasses import dataclass
from unittest import mock

import jsonschema
import pytest

from shardlib.cli import main
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.table import Table
from shardlib.report.schedule_summary import HEADINGS

SIZE = ["--stages", "4", "--microbatches", "8"]


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


def run(*arguments):
    """The command in this process, on 80 columns."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="80"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main(["schedule", *map(str, arguments)])
    return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def refused(*arguments):
    """The error message of a command that must fail with exit status 2, without traceback, in at most 10 lines."""
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert 1 <= len(result.stderr.splitlines()) <= 10
    return result.stderr


def shell(*arguments, **environment):
    command = [sys.executable, "-m", "shardlib", "schedule", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"} | environment)


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("lockstep", [[], ["--lockstep"]], ids=["free", "lockstep"])
def test_every_schedule_shows_its_grid_within_80_columns(schedule, lockstep):
    result = run(schedule.name, *SIZE, *lockstep)
    assert result.exit_code == 0
    grid = result.stdout.split("key:")[0]
    assert max(map(len, grid.splitlines())) <= 80
    letters = sum(grid.count(f"{kind}7") + grid.count(f"{kind.lower()}7") for kind in "FBIW")
    assert letters == sum(
        cell.microbatch == 7 for row in build(schedule.name, stages=4, microbatches=8).rows for cell in row
    )
    for word in ("makespan", "bubble_fraction", "span_bubble_fraction", "peak_activations", "messages"):
        assert word in result.stdout


def test_the_textbooks_formula_stands_beside_the_simulated_bubble():
    output = run("1f1b", "--stages", 8, "--microbatches", 32).stdout
    assert "bubble_fraction       17.9%   textbook: (p-1)/(m+p-1) = 17.9%" in output
    assert "peak_activations      8 7 6 5 4 3 2 1   textbook, worst: p = 8" in output
    output = run("zb_h2", "--stages", 8, "--microbatches", 32).stdout
    assert "span_bubble_fraction  0.0%   textbook: (p-1)(F+I-2W)" in output
    assert "textbook" not in run("zb_h1", *SIZE, "--costs", "F=1,B=2,W=1,head=1").stdout


def test_json_parses_whole_and_has_every_figure():
    result = run("zb_h1", "--stages", 8, "--microbatches", 32, "--lockstep", "--json")
    value = json.loads(result.stdout)
    assert {"bubble_fraction", "span_bubble_fraction", "makespan", "peak_activations", "grid"} <= set(value)
    assert value["makespan"] == 103 and value["bubble_fraction"] == pytest.approx(7 / 103)
    assert value["peak_activations"] == [8.0] * 8
    assert value["grid"][0][:9] == [*(f"F{number}" for number in range(8)), "I0"]
    assert value["spans"][7][0] == [7.0, 8.0]
    schema = json.loads(run("--json-schema").stdout)
    jsonschema.validate(value, schema)
    jsonschema.validate(json.loads(run("zb_v", *SIZE, "--json").stdout), schema)


def test_files(tmp_path):
    names = ("a.svg", "a.html", "a.csv", "a.trace.json")
    svg, html, csv, trace = (tmp_path / name for name in names)
    result = run("zb_v", *SIZE, "--svg", svg, "--html", html, "--csv", csv, "--trace", trace, "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert [line.split("/")[-1] for line in result.stderr.splitlines()] == list(names)
    assert xml.etree.ElementTree.fromstring(svg.read_text()).tag.endswith("svg")
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert Table.parse(csv.read_text()) == build("zb_v", stages=4, microbatches=8)
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_users_csv_is_a_schedule(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0,F1,B0,B1\nF0,B0,F1,B1\n")
    result = run(path)
    assert result.exit_code == 0 and "mine: 2 stages, 2 microbatches" in result.stdout
    table = tmp_path / "mine.json"
    table.write_text(build("zb_v", stages=3, microbatches=6).to_json())
    assert "zb_v: 3 stages x 2 chunks (v), 6 microbatches" in run(table).stdout


def test_compare_tabulates_all_and_says_who_wins():
    output = run("--compare", "--stages", 8, "--microbatches", 32, "--max-activations", 5).stdout
    lines = output.splitlines()
    assert lines[0].split() == list(HEADINGS)
    assert max(map(len, lines[:10])) <= 80
    assert {line.split()[0] for line in lines[1:10]} == {schedule.name for schedule in ALL}
    assert lines[-2] == "fastest free-running with at most 5 live activations: v_half, makespan 106, peak 5"
    value = json.loads(run("--compare", *SIZE, "--json").stdout)
    jsonschema.validate(value, json.loads(run("--json-schema").stdout))
    assert value["winner"]["free"] == "zb_v"
    assert len(value["schedules"]) == len(ALL) and value["schedules"][0]["lockstep"]["makespan"]


def test_compare_says_which_schedules_do_not_exist_at_a_size():
    output = run("--compare", "--stages", 4, "--microbatches", 6).stdout
    assert "interleaved_1f1b: not defined here: stages=4 does not divide microbatches=6" in output


def test_compare_takes_a_table_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0,F1,B0,B1\nF0,B0,F1,B1\n")
    output = run(path, "--compare").stdout
    assert any(line.startswith("mine ") for line in output.splitlines())


def test_synthesize_by_name():
    result = run("synthesize", "--stages", 2, "--microbatches", 3, "--chunks", 1, "--max-activations", 2)
    assert result.exit_code == 0
    assert "proved optimal" in result.stderr and "synthesized: 2 stages, 3 microbatches" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zbh1"], "schedule 'zbh1' is unknown (did you mean 'zb_h1'?)"),
        ([], "name a schedule: gpipe, 1f1b"),
        (["1f1b", "--stages", 0], "--stages 0: this is not from 1 to 2147483647\n  fix: --stages 4"),
        (["1f1b", "--microbatches", "many"], "--microbatches many: this is not a whole number"),
        (["1f1b", "--microbatches", 10**9], "is above 500,000\n  fix: 1f1b with stages=4, chunks=1, microbatches="),
        (["1f1b", "--chunks", 2], "chunks=2: it has 1 per rank"),
        (["interleaved_1f1b", "--microbatches", 6], "does not divide microbatches=6\n  fix: interleaved_1f1b with"),
        (["1f1b", "--costs", "F=1,Q=2"], "cost 'Q' is unknown"),
        (["1f1b", "--costs", "F=1:2:3"], "forward has 3 numbers for 4 ranks"),
        (["1f1b", "--lockstep", "--idle", "maks"], "idle='maks' is unknown"),
        (["no.csv"], "cannot read no.csv: No such file or directory"),
        (["1f1b", "--svg", "/no/such/folder/a.svg"], "cannot write /no/such/folder/a.svg: No such file or directory"),
        (["1f1b", "--max-activations", 0], "--max-activations 0 must be above 0"),
        (["zb_h1", "--prove", 5], "--prove goes with synthesize, not with zb_h1"),
        (["--compare", "--svg", "a.svg"], "--compare writes no files"),
        (["synthesize", "--max-activations", 0.25], "fix: max_activations=1 or more"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_for_people(arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"F0,Q1", b"# placement=w\nF0,B0", b"F0,B0\nF0", b"\x00" * 50]
)
def test_any_bad_file_is_an_error_for_people(tmp_path, content):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    refused(path)


def test_sizes_that_contradict_the_file_are_refused(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0,B0\nF0,B0\n")
    assert "--stages 4, but" in refused(path, "--stages", 4)


def test_a_limit_that_is_passed_is_a_failed_check():
    result = run("gpipe", *SIZE, "--max-activations", 4)
    assert result.exit_code == 1 and "gpipe needs 8 live activations, more than --max-activations 4" in result.stderr
    assert run("--compare", *SIZE, "--max-activations", 0.5).exit_code == 1
    assert run("1f1b", *SIZE, "--max-activations", 4).exit_code == 0


def test_as_a_process():
    done = shell("1f1b", *SIZE)
    assert done.returncode == 0 and "\x1b" not in done.stdout and done.stderr == ""
    assert done.stdout.startswith("rank 0 F0F1F2F3............B0--F4B1--")
    done = shell("zbh1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[0] == "error: schedule 'zbh1' is unknown (did you mean 'zb_h1'?)"
    assert shell("gpipe", *SIZE, "--max-activations", 3).returncode == 1


def in_a_terminal(arguments, **environment):
    """stdout of the command when it is a terminal."""
    pty = pytest.importorskip("pty")
    master, follower = pty.openpty()
    command = [sys.executable, "-m", "shardlib", "schedule", *arguments]
    settings = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    settings |= {"TERM": "xterm-256color", "COLUMNS": "80"} | environment
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, env=settings)
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:
            break
        if not block:
            break
        output += block
    os.close(master)
    assert process.wait() == 0
    return output.decode()


def test_a_missing_scipy_is_exit_status_3_with_its_install_line():
    code = (
        "import sys; sys.modules['scipy'] = sys.modules['scipy.optimize'] = None; from shardlib.cli.app import main; "
    )
    code += "sys.argv[1:] = ['schedule', 'synthesize', '--prove', '1', '--max-activations', '2']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == "error: integer programming needs scipy: pip install 'shardlib[planner]'\n"


def test_colour_on_a_terminal_and_never_under_no_color():
    assert "\x1b[" in in_a_terminal(["zb_h1", *SIZE])
    assert "\x1b" not in in_a_terminal(["zb_h1", *SIZE], NO_COLOR="1")
    assert "\x1b" not in in_a_terminal(["zb_h1", *SIZE], TERM="dumb")


def test_no_jax_is_imported():
    code = "import sys; from shardlib.cli.app import app; app(['schedule', '1f1b', '--json'], standalone_mode=False)"
    code += "; assert not {'jax', 'flax', 'scipy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
