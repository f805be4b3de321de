"""One promise in bytes, and which promises of the strategies hold under a plan.

In: a plan, mesh axes. Out: `PromisedCollective`s made from sizes.

    in_force = InForce.of(plan, axes=("data", "fsdp"))
    promises = in_force.make("split parameters", ("fsdp",), buffer_bytes=4096, dtype="float32")
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardlib.cost.arrays import degree
from shardlib.cost.collectives import ring_bytes
from shardlib.plan import Plan
from shardlib.specs import itemsize
from shardlib.strategies import ALL
from shardlib.strategies.promise import Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class PromisedCollective:
    """Collectives of one kind that move arrays of one sort over the same mesh axes in one step; a static leaf.

    Args:
        kind: XLA's name.
        axes: mesh axes it runs over together, in mesh order.
        what: which arrays, in the words of the strategies.
        count: executions in one step, each array counted by itself.
        bytes_per_device: sent in one step under ring algorithms; where devices differ, by the busiest.
        loop: it runs inside the loop over microbatches.
        exact: the program must move just that; otherwise the compiler chooses, up to `form_bytes`.
        form_kind: the kind in which XLA's CPU backend is known to express it.
        form_bytes: bytes in that form; more than `bytes_per_device` where the backend knows no better.
        widened_bytes: bytes where the backend widens 16-bit elements to 32 bits, as XLA:CPU does in reductions.
        taken: of the turns of its loop, the share in which the branch around it is taken; 1 where it has none.
        unread_bytes: bytes that a compiler may leave out, because what they carry may be read by nothing.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    count: int
    bytes_per_device: float
    loop: bool
    exact: bool
    form_kind: str
    form_bytes: float
    widened_bytes: float
    taken: float = 1.0
    unread_bytes: float = 0.0

    @property
    def axis(self) -> str:
        """The axes as text: `data+fsdp`."""
        return "+".join(self.axes)

    def plus(self, other: "PromisedCollective") -> "PromisedCollective":
        """Both together: the same kind, of the same arrays, over the same axes."""
        total = self.bytes_per_device + other.bytes_per_device
        always = self.bytes_per_device / self.taken + other.bytes_per_device / other.taken
        return replace(
            self,
            count=self.count + other.count,
            bytes_per_device=total,
            form_bytes=self.form_bytes + other.form_bytes,
            widened_bytes=self.widened_bytes + other.widened_bytes,
            taken=total / always if always else 1.0,
            unread_bytes=self.unread_bytes + other.unread_bytes,
        )


class Turns(NamedTuple):
    """How often something under a branch runs in one step, and how many turns the loop around the branch has."""

    taken: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The promises of mesh axes that hold under a plan, by tensors and axis; a static leaf."""

    plan: Plan
    exact: bool
    promises: dict[str, dict[str, Promise]]

    @classmethod
    def of(cls, plan: Plan, axes: tuple[str, ...], *, gather: str | None = None) -> "InForce":
        """Those of these axes; `gather` for something that is gathered otherwise than the plan says."""
        lowering, _ = plan.chosen_lowering
        promises: dict[str, dict[str, Promise]] = {}
        for strategy in ALL:
            for promise in strategy.promises if strategy.axis in axes else ():
                if promise.holds(lowering=lowering, gather=gather or plan.gather, zero=plan.zero):
                    promises.setdefault(promise.tensors, {})[strategy.axis] = promise
        return cls(plan=plan, exact=lowering == "explicit", promises=promises)

    def alone(self, tensors: str, axis: str) -> bool:
        """Whether an axis reduces these by itself."""
        promise = self.promises.get(tensors, {}).get(axis)
        return promise is not None and promise.alone

    def make(
        self,
        tensors: str,
        axes: tuple[str, ...],
        *,
        buffer_bytes: int,
        dtype: str,
        passes: int = 1,
        form_factor: int = 1,
        turns: Turns | None = None,
    ) -> Iterator[PromisedCollective]:
        """One collective over axes together, when their strategies promise it.

        Args:
            tensors, axes: of the promise.
            buffer_bytes: what `ring_bytes` takes.
            dtype: on the wire.
            passes: how often, each time.
            form_factor: how much larger the compiler's own form is.
            turns: how often it runs in the ticks of a pipeline; else as often as the promise says.
        """
        promise = next((self.promises[tensors][axis] for axis in axes if axis in self.promises.get(tensors, {})), None)
        if promise is None:
            return
        microbatches = self.plan.num_microbatches if promise.times == "microbatch" else 1
        times = promise.count * passes * (turns.taken if turns else microbatches)
        sent = times * ring_bytes(promise.kind, buffer_bytes=buffer_bytes, group_size=degree(self.plan, axes))
        form_kind, form_bytes = (promise.kind, sent) if self.exact else backend_form(promise.kind, sent)
        yield PromisedCollective(
            kind=promise.kind,
            axes=tuple(axis for axis in self.plan.mesh.names if axis in axes),
            what=tensors,
            count=times,
            bytes_per_device=sent,
            loop=turns is not None or microbatches > 1,
            exact=self.exact,
            form_kind=form_kind,
            form_bytes=form_bytes * form_factor,
            widened_bytes=sent * (4 / itemsize(dtype) if itemsize(dtype) == 2 else 1),
            taken=turns.taken / turns.total if turns else 1.0,
        )


def backend_form(kind: str, sent: float) -> tuple[str, float]:
    """XLA's CPU partitioner makes no reduce-scatter: it reduces everything everywhere and slices."""
    return ("all-reduce", 2 * sent) if kind == "reduce-scatter" else (kind, sent)
