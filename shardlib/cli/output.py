"""What every command shares: where text goes, how errors end, which exit status means what.

stdout carries results (one JSON object under --json); stderr carries progress, warnings and errors.
Exit status: 0 fine, 1 a check the user asked for failed, 2 usage, 3 something missing in the environment,
75 restart me, 130 interrupted.

    with user_errors(json_mode): ...
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from meshes.errors import ShardingError

FAILED, USAGE, MISSING, INTERRUPTED = 1, 2, 3, 130
MAX_ERROR_LINES = 10


class CheckFailed(Exception):
    """A check the user asked for failed (a NaN loss, an unequal result): exit status 1."""


class MissingDependency(Exception):
    """The environment lacks something (an extra, a compiler): exit status 3; the message is the install line."""


def print_json(value: Any) -> None:
    """Writes one JSON object to stdout; non-finite numbers become null, since JSON has none."""
    sys.stdout.write(json.dumps(_finite(value), indent=2) + "\n")


def note(message: str) -> None:
    """One line to stderr: progress, warnings, anything that is not the result."""
    print(message, file=sys.stderr, flush=True)


def color_wanted(stream: Any) -> bool:
    """Colour only on a terminal, and never under NO_COLOR (https://no-color.org) or TERM=dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns the errors users can cause into at most ten lines on stderr and the right exit status."""
    try:
        yield
    except (ShardingError, CheckFailed, MissingDependency) as error:
        _fail(str(error), {CheckFailed: FAILED, MissingDependency: MISSING}.get(type(error), USAGE))
    except BrokenPipeError:
        # The reader of our stdout (head, less) has gone; point stdout at nothing so that closing it stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)


def _fail(message: str, status: int) -> None:
    lines = message.splitlines()
    if len(lines) > MAX_ERROR_LINES:
        hidden = len(lines) - MAX_ERROR_LINES + 1
        lines = [*lines[: MAX_ERROR_LINES - 1], f"... and {hidden} more lines (all of them with SHARDLIB_ALL_ERRORS=1)"]
        if os.environ.get("SHARDLIB_ALL_ERRORS"):
            lines = message.splitlines()
    for line in ["error: " + lines[0], *lines[1:]]:
        note(line)
    raise SystemExit(status)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
