"""What every command shares: where text goes, how errors end, which exit status means what.

stdout carries results (one JSON object under --json); stderr carries progress, warnings and errors.
Exit status: 0 fine, 1 a check the user asked for failed, 2 usage, 3 something missing in the environment,
70 a bug of ours, 75 restart me, 130 interrupted. SHARDLIB_TRACEBACK=1 shows the traceback behind any error.

    with user_errors(): ...
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import typer

from meshes.errors import ShardingError

FAILED, USAGE, MISSING, BUG, INTERRUPTED = 1, 2, 3, 70, 130
MAX_ERROR_LINES = 10
MAX_LINE = 500
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA's errors begin when an allocation fails


class CheckFailed(Exception):
    """A check the user asked for failed (a NaN loss, an unequal result): exit status 1."""


class BadOption(Exception):
    """An option's text cannot be read: exit status 2. No ValueError: the option parser would wrap those."""


class MissingDependency(Exception):
    """The environment lacks something (an extra, a compiler): exit status 3; the message is the install line."""


def print_json(value: Any) -> None:
    """Writes one JSON object to stdout; non-finite numbers become null, since JSON has none."""
    sys.stdout.write(json.dumps(_finite(value), indent=2) + "\n")


def note(message: str) -> None:
    """One line to stderr: progress, warnings, anything that is not the result."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stdout_for_results() -> Iterator[None]:
    """While the work is done, what models and losses print goes to stderr, so that stdout parses whole."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns the errors users can cause into at most ten lines on stderr and the right exit status.

    A bug of ours (any other exception) keeps its traceback, for the report of it.
    """
    try:
        yield
        sys.stdout.flush()
    except (ShardingError, BadOption) as error:
        _fail(str(error), USAGE)
    except CheckFailed as error:
        _fail(str(error), FAILED)
    except MissingDependency as error:
        _fail(str(error), MISSING)
    except typer.TyperException as error:
        _fail(_usage_text(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our stdout (head, less) has gone; point stdout at nothing so that closing it stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or str(error).startswith(OUT_OF_MEMORY):
            _fail("not enough memory for these sizes\n  fix: a smaller --batch or --length, or more devices", MISSING)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            _fail(f"the result cannot be written: {error.strerror}", MISSING)
        traceback.print_exc()
        note("error: this is a bug in shardlib; please report the lines above and the command")
        raise SystemExit(BUG) from None


def _fail(message: str, status: int) -> NoReturn:
    if os.environ.get("SHARDLIB_TRACEBACK"):
        traceback.print_exc()
    for line in _shortened(message.splitlines() or ["no message"]):
        note(line)
    raise SystemExit(status)


def _shortened(lines: list[str]) -> list[str]:
    """At most ten lines, the last fix among them; all of them under SHARDLIB_TRACEBACK."""
    lines = [f"error: {lines[0]}", *lines[1:]]
    if os.environ.get("SHARDLIB_TRACEBACK"):
        return lines
    lines = [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..." for line in lines]
    if len(lines) <= MAX_ERROR_LINES:
        return lines
    end = lines[-1:] if lines[-1].lstrip().startswith("fix:") else []
    kept = lines[: MAX_ERROR_LINES - 1 - len(end)]
    hidden = len(lines) - len(kept) - len(end)
    return [*kept, f"... and {hidden} more lines, shown with SHARDLIB_TRACEBACK=1", *end]


def _usage_text(error: typer.TyperException) -> str:
    """The option parser's own message in our form, with the usage line of the command.

    >>> _usage_text(...)
    no such option: --mehs (did you mean '--mesh'?)
      usage: shardlib explain --mesh MESH [OPTIONS] MODEL
      fix: shardlib explain --help lists the options
    """
    possible = getattr(error, "possibilities", None)
    text = (error.message if possible else error.format_message()).replace("Value error, ", "").rstrip(".")
    if possible:
        text += f" (did you mean {possible[0]!r}?)"
    context = getattr(error, "ctx", None)
    if context is None:
        option = getattr(error, "option_name", None)
        fix = f"{option} VALUE" if option else "shardlib --help lists the commands"
        return f"{text[:1].lower()}{text[1:]}\n  fix: {fix}"
    usage = " ".join(context.get_usage().removeprefix("Usage: ").replace("{", "").replace("}", "").split())
    fix = f"{context.command_path} --help lists the options"
    return f"{text[:1].lower()}{text[1:]}\n  usage: {usage}\n  fix: {fix}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
