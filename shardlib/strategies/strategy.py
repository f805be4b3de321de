"""What a mesh axis means: which logical axes it splits and what it will move, in one declarative value.

In: nothing. Out: `Strategy` values, one per file of this folder, listed once in `strategies.ALL`.

    data = Strategy(axis="data", splits_batch=True, rules=(), summary="...", promises=(Promise(...),))
"""

from dataclasses import dataclass

from shardlib.rules import Rule
from shardlib.strategies.promise import Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The default meaning of one mesh axis; a static leaf.

    Args:
        axis: mesh axis name.
        splits_batch: the axis takes a share of the batch dim.
        rules: rules beyond the batch.
        summary: one line for tables and help.
        promises: every collective it causes; those of other plans do not hold.
    """

    axis: str
    splits_batch: bool
    rules: tuple[Rule, ...]
    summary: str
    promises: tuple[Promise, ...]
