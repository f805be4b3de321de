"""What attention over divided sequences moves, by its kind.

In: a plan, a model's arrays with its calls of the attention slot. Out: `PromisedCollective`s over the context axis.

    promises = of_attention(plan, arrays)

Sources: as for `ops.context_choice`, whose bytes these are.
"""

from collections.abc import Iterator

from shardlib.attention_calls import RepeatedCall
from shardlib.context import CONTEXT
from shardlib.cost.arrays import Arrays, Attention
from shardlib.cost.collectives import ring_bytes
from shardlib.cost.pipelines import work_turns
from shardlib.cost.products import recomputes
from shardlib.cost.promised_collective import PromisedCollective, Turns
from shardlib.ops.context_choice import all_to_all_sent, copies_of_kv_heads, gather_sent, ring_sent
from shardlib.ops.context_layout import needed_shifts
from shardlib.plan import Plan
from shardlib.strategies.context import context as strategy

_LABEL_BYTES = 4
_NARROW = ("keys and values", "heads")  # the others are 32 bits wide


def of_attention(plan: Plan, arrays: Arrays) -> Iterator[PromisedCollective]:
    """Everything about one step; of a pipeline, as for products.

    The compiler may run a forward pass once more, where the plan or the model recomputes layers: that is the known
    form of these promises.
    """
    attention = arrays.attention
    if attention is None:
        return
    turns = work_turns(plan, arrays.stages) if arrays.stages else Turns(plan.num_microbatches, plan.num_microbatches)
    share = 1.0
    if arrays.stages is not None:  # a turn runs one chunk of the layers
        share = arrays.stages.partition.most / arrays.stages.partition.num_layers
    for call in attention.calls:
        again = call.again or recomputes(plan)
        for promise in strategy.promises:
            if promise.attention != attention.kind:
                continue
            forward, backward = _sizes(plan, call, attention, promise.tensors)
            times = turns.taken * call.times * share * promise.count
            sent = times * (forward + backward)
            yield PromisedCollective(
                kind=promise.kind,
                axes=(CONTEXT,),
                what=promise.tensors,
                count=round(times * ((forward > 0) + (backward > 0))),
                bytes_per_device=sent,
                loop=turns.total > 1,
                exact=False,
                form_kind=promise.kind,
                form_bytes=times * (forward * (2 if again else 1) + backward),
                widened_bytes=sent * (2 if call.call.itemsize == 2 and promise.tensors in _NARROW else 1),
                taken=turns.taken / turns.total,
            )


def _sizes(plan: Plan, repeated: RepeatedCall, attention: Attention, tensors: str) -> tuple[float, float]:
    """Bytes sent by a device in one call, forward and backward."""
    call, shards = repeated.call, plan.mesh.size(CONTEXT)
    batch, length, heads, head_dim = call.query
    batch = max(batch // (plan.num_batch_shards * plan.num_microbatches), 1)
    tensor = plan.mesh.size("tensor") if "tensor" in plan.mesh.names and heads % plan.mesh.size("tensor") == 0 else 1
    kv_heads = call.key[2] * copies_of_kv_heads(call.key[2], shards=tensor) // tensor
    sizes = {
        "context": shards,
        "length": length,
        "batch": batch,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype_bytes": call.itemsize,
    }
    if tensors == "token labels":
        labels = ring_bytes("all-gather", buffer_bytes=_LABEL_BYTES * batch * length, group_size=shards)
        return labels * call.has_segments, 0.0
    if attention.kind == "all_to_all":
        sent = all_to_all_sent(heads=heads // tensor, **sizes)
        return sent, sent
    if attention.kind == "ring":
        hops = needed_shifts(
            length=length,
            shards=shards,
            placement=attention.placement,
            causal=call.causal,
            window=call.window,
        )
        forward, backward = ring_sent(hops=len(hops) - 1, **sizes)
        return (forward, forward) if tensors == "keys and values" else (0.0, backward - forward)
    forward, backward = gather_sent(**sizes)
    return (forward, 0.0) if tensors == "keys and values" else (0.0, backward)
