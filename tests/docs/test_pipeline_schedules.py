"""The tutorial on schedules: its pictures are what the code draws, its console blocks what the command prints.

Its python blocks run in test_examples.py, like those of every page.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardlib.cli.app import app
from shardlib.pipeline.schedules import ALL

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = (DOCS / "pipeline_schedules.md").read_text(encoding="utf-8")


def maker():
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_pictures_are_what_the_code_draws():
    drawn = dict(maker().pictures())
    committed = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    shown = set(re.findall(r"\(pictures/([\w.]+)\)", TUTORIAL))
    assert shown <= set(drawn), "every picture shown is drawn by the code"
    for name, text in drawn.items():
        assert committed.get(name) == text, f"{name}: run python docs/make_pictures.py and look at the difference"
    assert {f"{schedule.name}.svg" for schedule in ALL} <= shown, "every schedule is shown"


BLOCKS = re.findall(r"```console\n\$ shardlib (.+)\n((?:.*\n)*?)```", TUTORIAL)


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_console_blocks_show_what_is_printed(command, output):
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80"})
    assert result.exit_code == 0 and result.stdout == output
