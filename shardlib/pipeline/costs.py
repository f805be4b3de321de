"""What a schedule's actions cost: times and sizes per virtual stage, exact whatever the units.

In: `Costs`, numbers for a whole rank or lists per stage, or the text `F=1,B=2,W=1,link=0`. Out: `Times`, whole
numbers on one common grid, so that simulated times and fractions are exact.

    Costs.parse("F=1,B=2,W=1,head=0.5").times(Placement.loop(4))
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from meshes.errors import ShardingError, caret, nearest
from shardlib.pipeline.placement import Placement

SMALLEST: Final = 1e-9
LARGEST: Final = 1e12

Number = int | float | Fraction
Numbers = Number | tuple[Number, ...]

_KEYS: Final = {
    "F": "forward",
    "B": "backward",
    "W": "weight",
    "link": "link",
    "embedding": "embedding",
    "head": "head",
    "activation": "activation",
    "stash": "stash",
    "message_bytes": "message_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Costs on a grid of whole numbers, indexed by virtual stage; `scale` grid points are one unit of cost.

    `input[s]` is the input gradient's share of `backward[s]`: the whole backward without its weight part.
    `activation` and `stash` are sizes on a grid of their own, `size_scale` points to one microbatch's
    activations on one rank.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    input: tuple[int, ...]
    weight: tuple[int, ...]
    link: int
    scale: int
    activation: tuple[int, ...]
    stash: tuple[int, ...]
    size_scale: int

    def of(self, kind: str) -> tuple[int, ...]:
        """The time of one kind of action, per virtual stage."""
        return {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times of F, B, W and of a message, and what lives how long; a static leaf.

    A single number is the cost of a whole rank, spread evenly over its chunks. A tuple has one number per rank
    (spread over its chunks) or one per virtual stage (taken as it is).

    Args:
        forward: F.
        backward: B, the whole backward. The input gradient I costs B - W.
        weight: W, the weight gradient's part of B.
        link: time from the end of an action to the arrival of its message on another rank.
        embedding: what the first virtual stage does on top of its layers: forward time, with backward and weight
            time in proportion, or a triple (F, B, W).
        head: the same for the last virtual stage.
        activation: M_B, what F leaves for the backward, where 1 is one microbatch on one rank.
        stash: M_W / M_B: which part of it W still needs after I; 1 is the safe bound (FORMULAS: about 0.94 with
            fused attention).
        message_bytes: bytes of one message.

    Raises:
        ShardingError: a number that is negative, not finite or extreme, F of 0, or W above B.
    """

    forward: Numbers = 1
    backward: Numbers = 2
    weight: Numbers = 1
    link: Number = 0
    embedding: Numbers = 0
    head: Numbers = 0
    activation: Numbers = 1
    stash: Number = 1
    message_bytes: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            for number in _listed(getattr(self, field.name)):
                if number != 0 and not SMALLEST <= number <= LARGEST:
                    limits = f"must be 0, or from {SMALLEST:g} to {LARGEST:g}"
                    raise ShardingError(
                        f"cost {field.name}={_number_text(number)} {limits}", fix="measure in another unit"
                    )
        if min(_listed(self.forward)) <= 0:
            raise ShardingError("the forward cost F must be above 0", fix="F=1")
        for name in ("embedding", "head"):
            if len(_listed(getattr(self, name))) not in (1, 3):
                raise ShardingError(
                    f"{name} takes one number or three (F, B, W)", fix=f"{name}=0.5 or {name}=0.5:1:0.5"
                )
        pairs = [(self.backward, self.weight)]
        pairs += [(triple[1], triple[2]) for triple in map(_listed, (self.embedding, self.head)) if len(triple) == 3]
        for backward, weight in pairs:
            whole, part = _listed(backward), _listed(weight)
            if any(part[k % len(part)] > whole[k % len(whole)] for k in range(max(len(whole), len(part)))):
                fix = "B is the whole backward, W its weight part: F=1,B=2,W=1"
                raise ShardingError(f"W={weight} is above B={backward}", fix=fix)

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """`F=1,B=2,W=1,link=0.1`; lists with colons: `F=1:1:2:1`. Keys left out keep their default.

        Raises:
            ShardingError: a malformed or unknown entry (a caret points at it).
        """
        values, position = dict[str, Numbers](), 0
        for entry in text.split(","):
            key, _, number = entry.partition("=")
            key, at = key.strip(), caret(text, position, max(1, len(entry)))
            if key not in _KEYS:
                known = f"{nearest(key, _KEYS)}; known are {', '.join(_KEYS)}"
                raise ShardingError(f"cost {key!r} is unknown{known}\n{at}", fix="F=1,B=2,W=1,link=0")
            if _KEYS[key] in values:
                raise ShardingError(f"cost {key!r} appears twice\n{at}", fix="give each cost once")
            try:
                parts = tuple(Fraction(part.strip()) for part in number.split(":"))
            except (ValueError, ZeroDivisionError):
                fix = f"{key}=1, or one number per stage: {key}=1:1:2:1"
                raise ShardingError(f"{number!r} is not a number\n{at}", fix=fix) from None
            if len(parts) > 1 and key in ("link", "stash", "message_bytes"):
                raise ShardingError(f"{key} takes one number\n{at}", fix=f"{key}={parts[0]}")
            values[_KEYS[key]] = parts[0] if len(parts) == 1 else parts
            position += len(entry) + 1
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        shown = []
        for key, name in _KEYS.items():
            value = getattr(self, name)
            if key in ("F", "B", "W") or value != Costs.__dataclass_fields__[name].default:
                shown.append(f"{key}=" + ":".join(_number_text(number) for number in _listed(value)))
        return ",".join(shown)

    def times(self, placement: Placement) -> Times:
        """These costs for every virtual stage of a placement, as whole numbers on a common grid.

        Raises:
            ShardingError: a list that has neither one entry per rank nor one per virtual stage.
        """
        return _times(self, placement)


@functools.lru_cache(maxsize=256)
def _times(costs: Costs, placement: Placement) -> Times:
    stages = len(placement.ranks)
    per_kind = [_spread(getattr(costs, name), placement, name=name) for name in ("forward", "backward", "weight")]
    first, last = ([kind[stage] for kind in per_kind] for stage in (0, stages - 1))
    for stage, extra in ((0, _extra(costs.embedding, first)), (stages - 1, _extra(costs.head, last))):
        for kind, amount in zip(per_kind, extra):
            kind[stage] += amount
    if any(part > whole for whole, part in zip(per_kind[1], per_kind[2])):
        raise ShardingError("W is above B on some stage", fix="B is the whole backward, W its weight part")
    link = _exact(costs.link)
    scale = math.lcm(link.denominator, *(number.denominator for kind in per_kind for number in kind))
    forward, backward, weight = (tuple(int(number * scale) for number in kind) for kind in per_kind)
    live = _spread(costs.activation, placement, name="activation")
    kept = [number * _exact(costs.stash) for number in live]
    size_scale = math.lcm(*(number.denominator for number in (*live, *kept)))
    return Times(
        forward=forward,
        backward=backward,
        input=tuple(whole - part for whole, part in zip(backward, weight)),
        weight=weight,
        link=int(link * scale),
        scale=scale,
        activation=tuple(int(number * size_scale) for number in live),
        stash=tuple(int(number * size_scale) for number in kept),
        size_scale=size_scale,
    )


def _listed(value: Numbers) -> tuple[Number, ...]:
    return value if isinstance(value, tuple) else (value,)


def _exact(number: Number) -> Fraction:
    """A float means the decimal it prints as: 0.1 is 1/10, not its binary neighbour."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def _number_text(number: Number) -> str:
    try:
        return f"{float(number):.12g}"
    except OverflowError:
        return "a number above 1e308"


def _spread(value: Numbers, placement: Placement, *, name: str) -> list[Fraction]:
    numbers = [_exact(number) for number in _listed(value)]
    chunks, stages = placement.num_chunks, len(placement.ranks)
    if len(numbers) == 1:
        return [numbers[0] / chunks] * stages
    if len(numbers) == placement.num_ranks:
        return [numbers[rank] / chunks for rank in placement.ranks]
    if len(numbers) == stages:
        return numbers
    sizes = f"{placement.num_ranks} ranks" + (f" or {stages} virtual stages" if chunks > 1 else "")
    raise ShardingError(
        f"{name} has {len(numbers)} numbers for {sizes}", fix="one number for all, or one per rank or virtual stage"
    )


def _extra(extra: Numbers, layer: Sequence[Fraction]) -> list[Fraction]:
    """The F, B and W of an embedding or head: as given, or in the proportions of the layers beside it."""
    numbers = [_exact(number) for number in _listed(extra)]
    return numbers if len(numbers) == 3 else [numbers[0] * kind / layer[0] for kind in layer]
