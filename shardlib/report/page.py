"""Where a report's rich text becomes text on stdout: styled on a terminal, plain everywhere else.

In: rich renderables. Out: characters that the stream can take, at a width that suits it.

    with page() as out: out.print(table)
"""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 160


def color_wanted(stream: Any) -> bool:
    """Colour only on a terminal, and never under NO_COLOR (https://no-color.org) or TERM=dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def page() -> Iterator[Console]:
    """A console whose text goes to stdout in one piece at the end."""
    buffer = _Buffer()
    styled = color_wanted(sys.stdout)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    yield Console(
        file=buffer,
        width=width,
        force_terminal=styled,
        color_system="standard" if styled else None,  # None also drops bold, which is an escape sequence too
        highlight=False,
        markup=False,
        emoji=False,
    )
    # Not printed by rich: its own answer to a closed pipe is exit status 1.
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines()))


class _Buffer(io.StringIO):
    """Text for stdout; rich draws in ASCII when stdout's encoding has no lines and corners."""

    @property
    def encoding(self) -> str:
        return sys.stdout.encoding or "utf-8"
