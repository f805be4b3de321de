"""Streams and exit statuses: pipes, closed pipes, terminals with and without colour, progress."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from shardlib.cli import session
from shardlib.cli.output import (
    CheckFailed,
    MissingDependency,
    print_json,
    user_errors,
)

from .conftest import ROOT

TINY = "shardlib.examples.tiny:tiny"
EXPLAIN = ("explain", TINY, "--mesh", "data=2")
COLOR = re.compile(r"\x1b\[[0-9;]*m")


PROGRESS = """
from shardlib.cli.session import progress
with progress("data=1", 3) as on_step:
    for step in range(3):
        on_step(step + 1, 5.5)
"""


def on_terminal(*command: str, columns: int = 100, **environment: str) -> tuple[str, int]:
    """All that Python, run with these arguments, writes to a terminal, and its exit status."""
    full = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    full |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TERM": "xterm-256color", **environment}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen([sys.executable, *command], env=full, stdin=theirs, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
            if not piece:
                break
            written += piece
    os.close(ours)
    return written.decode(), running.returncode


def test_color_on_a_terminal_and_lines_that_fit():
    text, status = on_terminal("-m", "shardlib", *EXPLAIN, columns=80)
    assert status == 0
    assert COLOR.search(text)
    assert max(map(len, COLOR.sub("", text).splitlines())) <= 80


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_escapes_where_color_is_unwanted(environment):
    text, status = on_terminal("-m", "shardlib", *EXPLAIN, **environment)
    assert status == 0
    assert "\x1b" not in text


def test_no_escapes_on_a_pipe_even_when_color_is_forced(process):
    done = process(*EXPLAIN, FORCE_COLOR="1", CLICOLOR_FORCE="1", TTY_COMPATIBLE="1")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr


def test_progress_on_a_terminal_has_a_bar_the_time_left_and_the_loss():
    text, status = on_terminal("-c", PROGRESS)
    assert status == 0
    plain = COLOR.sub("", text)
    assert re.search(r"data=1 loss 5\.5000 ━+ 3/3 \d:\d\d:\d\d", plain)


def test_progress_has_no_color_under_no_color():
    text, status = on_terminal("-c", PROGRESS, NO_COLOR="1")
    assert status == 0
    assert "3/3" in text
    assert not COLOR.search(text)


def test_progress_on_a_dumb_terminal_has_no_escapes():
    text, status = on_terminal("-c", PROGRESS, TERM="dumb")
    assert status == 0
    assert "\x1b" not in text


def test_progress_in_a_pipe_is_at_most_a_line_every_ten_seconds(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    with session.progress("data=2", 100) as on_step:
        for step in range(1, 101):
            now[0] += 0.5
            on_step(step, 1.0 / step)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "data=2 step 20/100 loss 0.0500"
    assert len(lines) == 5


def test_closed_pipe_is_quiet(process, tmp_path):
    command = f"{sys.executable} -m shardlib {' '.join(EXPLAIN)} | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("m0\n", "")


def test_full_disk_is_said_in_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardlib", *EXPLAIN],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (3, "error: the result cannot be written: No space left on device\n")


def test_an_encoding_without_lines_and_corners(process):
    done = process(*EXPLAIN, "--versus", "tensor=2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "Dense_0/kernel" in done.stdout


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckFailed("unequal"), 1),
        (MissingDependency("pip install x"), 3),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 3),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_status(capsys, error, status):
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error
    assert ended.value.code == status
    assert capsys.readouterr().err.startswith("error: ")


def test_long_messages_keep_their_last_fix(capsys):
    message = "\n".join(["too much:", *(f"- problem {i} " + "x" * 900 for i in range(40)), "  fix: less"])
    with pytest.raises(SystemExit), user_errors():
        raise CheckFailed(message)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-2:] == ["... and 33 more lines, shown with SHARDLIB_TRACEBACK=1", "  fix: less"]
    assert max(map(len, lines)) < 600


def test_json_has_no_numbers_that_are_none(capsys):
    print_json({"losses": [1.0, float("nan"), float("inf")], "deep": {"x": (float("-inf"),)}})
    assert "NaN" not in (text := capsys.readouterr().out)
    assert text.count("null") == 3
