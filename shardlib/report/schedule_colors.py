"""Colours of schedule pictures: one hue per kind of work, told apart by the colour-blind too.

In: a kind and a chunk. Out: a hex colour, and the one for text on it. Hues from Okabe and Ito, Color Universal
Design (2008); later chunks are tints of the same hue.

    fill("F", chunk=1, num_chunks=2)    # a lighter blue
"""

from typing import Final

HUES: Final = {"F": "#0072B2", "I": "#E69F00", "W": "#009E73"}
"""Forward, input gradient, weight gradient; a whole backward shows both of its parts."""
NAMES: Final = {"F": "forward", "I": "input gradient", "W": "weight gradient"}
DARK, LIGHT = "#111111", "#FFFFFF"
STRONGEST_TINT: Final = 0.5


def fill(kind: str, *, chunk: int = 0, num_chunks: int = 1) -> str:
    """The colour of one kind of work on one chunk."""
    tint = STRONGEST_TINT * chunk / max(1, num_chunks - 1)
    return "#" + "".join(f"{round(part + (255 - part) * tint):02X}" for part in _rgb(HUES[kind]))


def ink(background: str) -> str:
    """Black or white text, whichever contrasts more (WCAG relative luminance)."""
    red, green, blue = (_linear(part / 255) for part in _rgb(background))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return DARK if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else LIGHT


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
