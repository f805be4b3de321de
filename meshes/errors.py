"""The one error type users meet, with a caret helper for errors that point into text.

In: what went wrong. Out: `ShardingError`, whose message says where, what, why and how to fix it.

    raise ShardingError("mesh axis 'tensr' is unknown", fix="did you mean 'tensor'?")
"""

import difflib
from collections.abc import Iterable


class ShardingError(ValueError):
    """A mistake in what the user asked for: the message says where, what, why, and the literal fix.

    Args:
        message: where and what and why, one line or several.
        fix: what to do about it, printed last as `fix: ...`.
    """

    def __init__(self, message: str, *, fix: str | None = None):
        super().__init__(message if fix is None else f"{message}\n  fix: {fix}")


def caret(text: str, position: int, length: int = 1) -> str:
    """Two lines: the text, and a caret under `text[position:position + length]`.

    >>> print(caret("data=x", 5))
      data=x
           ^
    """
    return f"  {text}\n  {' ' * position}{'^' * max(1, length)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'tensor'?)"` for the closest known name, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def raise_collected(failures: list[str], *, heading: str) -> None:
    """Raises one `ShardingError` listing every failure; returns when there is none."""
    if failures:
        body = "\n".join(f"- {failure}" for failure in failures)
        raise ShardingError(f"{heading}\n{body}")
