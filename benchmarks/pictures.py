"""Pictures of benchmarks, by matplotlib, which only they need.

figure = new_figure(figsize=(6, 4))
"""

from typing import Any


def new_figure(*, figsize: tuple[float, float]) -> Any:
    """An empty `matplotlib.figure.Figure`; sizes in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # optional: only this option needs it
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install 'shardlib[report]'") from None
    return Figure(figsize=figsize, layout="constrained")
