"""Every example of the READMEs and docs/ runs: python blocks in one process per file, console lines one by one.

A ```text block right after a ```python block is what it prints.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "shardlib/pipeline/README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = ("pip install",)  # the environment of the tests is the installation


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def console_lines(page: Path) -> list[str]:
    lines = [line for kind, body in blocks(page) if kind == "console" for line in body.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ") and not line[2:].startswith(NOT_RUN)]


CONSOLE = [(page, line) for page in PAGES for line in console_lines(page)]
PYTHON = [page for page in PAGES if any(kind == "python" for kind, _ in blocks(page))]


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path):
    found = blocks(page)
    for index, (kind, body) in enumerate(found):
        if kind != "python":
            continue
        done = run([sys.executable, "-c", body], tmp_path)
        assert done.returncode == 0, f"{page.name} block {index}:\n{body}\n{done.stderr}"
        if index + 1 < len(found) and found[index + 1][0] == "text":
            assert done.stdout.strip() == found[index + 1][1].strip()


@pytest.mark.parametrize(("page", "line"), CONSOLE, ids=[line for _, line in CONSOLE])
def test_console_lines_succeed(page, line, tmp_path):
    command = [sys.executable, "-m", "shardlib", *line.split()[1:]] if line.startswith("shardlib ") else line.split()
    done = run(command, tmp_path)
    assert done.returncode == 0, f"{page.name}: {line}\n{done.stdout}\n{done.stderr}"


def test_there_are_examples():
    assert len(CONSOLE) >= 5
    assert len(PYTHON) >= 1
