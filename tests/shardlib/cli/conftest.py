"""The command line in this process, in an empty folder: compiled programs and imports are shared, so a run is fast."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardlib.cli import main

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """`cli("explain", ...) -> Result`, run from an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHARDLIB_TRACEBACK", raising=False)

    def run(*arguments: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """Writes a module of the user's in the current folder; importable under its name for this test only."""
    names = []

    def write(name: str, body: str) -> None:
        (tmp_path / f"{name}.py").write_text(body)
        names.append(name)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def process(tmp_path):
    """`process("explain", ...)`: as a process of its own, for what only a process shows."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        full = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
        command = [sys.executable, "-m", "shardlib", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=full, capture_output=True, text=True, timeout=120, check=False)

    return run
