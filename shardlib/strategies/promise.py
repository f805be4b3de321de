"""What a mesh axis will move: collectives by kind and by which arrays; their sizes come with the model.

In: nothing. Out: `Promise` values, stated in each strategy's file and turned into bytes by `cost.promises`.

    Promise(kind="reduce-scatter", tensors="split gradients", times="step", lowering="explicit")
"""

from dataclasses import dataclass
from typing import Literal

Tensors = Literal[
    "split parameters",  # parameters that the axis splits, made whole where they are used
    "spread vocabulary",  # of embedding and head that all stages compute together: rows, messages, statistics
    "split gradients",  # gradients of which each device keeps a part along the axis
    "whole gradients",  # the other gradients
    "updated parameters",  # parameters that are whole along the axis while their optimizer state is split by it
    "sums",  # the loss, its weight and metrics, packed in one vector
    "column inputs",  # the residual stream, once for each group of products whose weights are split by column
    "row outputs",  # the residual stream, once for each product whose weights are split by row
    "embeddings",  # rows of a vocabulary table that is split along the vocabulary
    "token statistics",  # one number per token, of logits split along the vocabulary
    "activations",  # what a pipeline stage hands to the next: the residual stream and what goes with it
    "cotangents",  # gradients of the same, handed back
    "keys and values",  # of attention over a divided sequence, to the queries of other parts
    "gradients of keys and values",  # and back, in float32
    "heads",  # queries, keys, values and results of attention, exchanged for whole sequences of fewer heads
    "token labels",  # which document each token belongs to
    "inputs",  # of the first and the last stage, from the stages that hold them
    "single layers",  # parameters of layers that a model holds one by one, to the stage of each
    "gradients of single layers",  # and back
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One kind of collective that a mesh axis causes, and when; a static leaf.

    Args:
        kind: XLA's name, one of `cost.collectives.KINDS`.
        tensors: what moves.
        times: "step", or "microbatch": once in each of them.
        count: executions each time.
        lowering: of the data-like axes under which it holds; None for both.
        gather: where the explicit lowering gathers; None for either.
        zero: the levels of ZeRO under which it holds.
        alone: reduced after all other axes and by itself, on what they left; the others of a kind are joined.
        attention: the kind of attention over divided sequences under which it holds; None for any, and for others.
        along_length: for axes that split the residual stream: True where they do, False where it stayed whole.
    """

    kind: str
    tensors: Tensors
    times: Literal["step", "microbatch"]
    count: int = 1
    lowering: Literal["automatic", "explicit"] | None = None
    gather: Literal["step", "microbatch"] | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    alone: bool = False
    attention: Literal["ring", "all_to_all", "gather"] | None = None
    along_length: bool | None = None

    def holds(self, *, lowering: str, gather: str, zero: int) -> bool:
        """Whether it is made under a plan with these options."""
        return self.lowering in (None, lowering) and self.gather in (None, gather) and zero in self.zero
