"""Exceptions in code that the user wrote: one message with the file and the line, no traceback.

In: a block that runs a MODEL, its loss or an optimizer. Out: its value, or `ShardingError` that says whose line failed.
An exception raised by our own code passes through, as the bug it is.

    with user_code("MODEL 'mine:small'"): module, loss, batch_spec = found()
"""

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshes.errors import ShardingError
from shardlib.cli.output import OUT_OF_MEMORY, CheckFailed, MissingDependency, stdout_for_results

_PACKAGES: Final = Path(__file__).parents[2]
_OURS: Final = (_PACKAGES / "shardlib", _PACKAGES / "meshes")
_EXAMPLES: Final = _PACKAGES / "shardlib" / "examples"
_LIBRARIES: Final = tuple(Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib"))
_SHOWN_LINES: Final = 3


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Names the user's line in any exception of the block; what the block prints goes to stderr."""
    try:
        with stdout_for_results():
            yield
    except (ShardingError, MissingDependency, CheckFailed, MemoryError):
        raise
    except SystemExit as error:
        raise ShardingError(
            f"{what} called sys.exit({error.code!r})", fix='keep scripts under if __name__ == "__main__"'
        ) from error
    except ModuleNotFoundError as error:
        raise missing(what, error) from error
    except Exception as error:
        place = _place(error)
        if place is None or str(error).startswith(OUT_OF_MEMORY):
            raise
        fix = "look at that line; SHARDLIB_TRACEBACK=1 shows how the program came there"
        raise ShardingError(f"{what} failed {place}\n{_summary(error)}", fix=fix) from error


def missing(what: str, error: ModuleNotFoundError) -> MissingDependency:
    """The install line for a module that the user's code imports."""
    package = (error.name or "").partition(".")[0]
    return MissingDependency(f"{what} imports {error.name!r}, which is not installed\n  fix: pip install {package}")


def _summary(error: Exception) -> str:
    text = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    lines = [line for line in f"{type(error).__name__}: {text}".splitlines() if line.strip()]
    more = ["..."] if len(lines) > _SHOWN_LINES else []
    return "\n".join(f"  {line}" for line in [*lines[:_SHOWN_LINES], *more])


def _place(error: Exception) -> str | None:
    """`at mine.py:12, in loss`: the user's innermost line, else the library's; None when our own code raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {_shown(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if _is_users(frame.filename)]
    if not own and (not frames or _is_ours(frames[-1].filename)):
        return None
    frame = own[-1] if own else frames[-1]
    inside = f", in {frame.name}" if frame.name != "<module>" else ""
    return f"at {_shown(frame.filename)}:{frame.lineno}{inside}"


def _is_users(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_EXAMPLES):
        return True
    is_library = any(path.is_relative_to(root) for root in _LIBRARIES)
    return path.suffix == ".py" and not is_library and not _is_ours(file)


def _is_ours(file: str) -> bool:
    return any(Path(file).is_relative_to(root) for root in _OURS)


def _shown(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else path
