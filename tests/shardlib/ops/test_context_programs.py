"""What context-parallel attention sends, holds and computes: from compiled programs, traced ones and counted tiles."""

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.audit.hlo import parse
from shardlib.ops import online_softmax
from shardlib.ops.attention_mask import allowed
from shardlib.ops.context_choice import all_to_all_sent, gather_sent, ring_sent
from shardlib.ops.context_layout import needed_shifts
from shardlib.ops.ring_attention import ring_attention
from tests.sequences import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LENGTH,
    QUICK,
    WINDOW,
    arrays,
    attention_of,
    masks,
    mesh_of,
    one_device,
    with_gradients,
)

PLAIN = {"length": LENGTH, "head_dim": HEAD_DIM, "dtype_bytes": 4}


@functools.cache
def text(kind, context, *, mask="causal", heads="GQA", gradients=False, length=LENGTH, **options):
    """A compiled program whose arguments lie where attention wants them."""
    mesh, axis, _ = mesh_of(kind, context)
    placed = NamedSharding(mesh, P("data", axis))
    attend = attention_of(kind, context, **masks(mask), **options)
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in arrays(KV_HEADS[heads], length=length)]
    function = functools.partial(with_gradients, attend) if gradients else lambda *x: attend(*x[:3])
    return str(jax.jit(function).lower(*given).compile(compiler_options=QUICK).as_text())


def sent(*arguments, **options):
    """Executions and bytes per device of each kind of collective, none of them under a condition."""
    totals = parse(text(*arguments, **options)).totals
    assert not any(total.num_in_branch for total in totals.values())
    return {kind: (total.times_executed, total.bytes_per_device) for kind, total in totals.items()}


@pytest.mark.parametrize("heads", ["GQA", "MQA"])
def test_a_ring_sends_kv_heads_only(heads):
    """2(c-1) permutes forward, twice that backward; the bytes of the formula, whatever the query heads."""
    context, batch = 4, BATCH // 2
    forward, backward = ring_sent(hops=3, context=context, batch=batch, kv_heads=KV_HEADS[heads], **PLAIN)
    assert sent("ring", context, heads=heads, placement="zigzag") == {"collective-permute": (6, forward)}
    if heads == "GQA":
        found = sent("ring", context, heads=heads, placement="zigzag", gradients=True)
        assert found == {"collective-permute": (18, forward + backward)}


def test_a_window_sends_only_to_those_that_see():
    hops = len(needed_shifts(length=LENGTH, shards=8, placement="contiguous", causal=True, window=WINDOW)) - 1
    assert hops == 2  # 4 tokens a shard: 6 tokens back reach two shards further
    forward, _ = ring_sent(hops=hops, context=8, batch=BATCH, kv_heads=2, **PLAIN)
    assert sent("ring", 8, mask="window") == {"collective-permute": (4, forward)}


@pytest.mark.parametrize(
    "kind, context, heads",
    [("all_to_all", 4, "GQA"), ("hybrid", 8, "GQA"), pytest.param("hybrid", 4, "MHA", marks=pytest.mark.exhaustive)],
)
def test_at_most_four_all_to_alls_each_way(kind, context, heads):
    shards = context if kind == "all_to_all" else context // 2
    sizes = PLAIN | {"length": LENGTH * shards // context, "batch": BATCH // min(2, 8 // context)}
    each_way = all_to_all_sent(context=shards, heads=HEADS, kv_heads=KV_HEADS[heads], **sizes)
    assert sent(kind, context, heads=heads)["all-to-all"] == (4, each_way)
    assert sent(kind, context, heads=heads, gradients=True)["all-to-all"] == (8, 2 * each_way)


def test_gathered_keys_and_values_and_scattered_gradients():
    forward, backward = gather_sent(context=4, batch=BATCH // 2, kv_heads=2, **PLAIN)
    found = sent("gather", 4, gradients=True)
    assert found == {"all-gather": (2, forward), "reduce-scatter": (2, backward)}


def squares(program, length):
    """Shapes in a program's text with two dims of the sequence's length or more."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", program)}
    return [shape for shape in shapes if sum(size >= length for size in shape) >= 2]


@pytest.mark.parametrize("kind", ["ring", "gather", "all_to_all"])
def test_no_device_holds_length_by_length(kind):
    length = 96
    assert not squares(text(kind, 4, gradients=True, length=length, largest_tile=12), length)


def test_a_square_on_a_device_is_seen():
    """Negative control: the scores of one device."""
    operands = arrays(2, length=96)[:3]
    program = jax.jit(functools.partial(one_device, causal=True)).lower(*operands).compile().as_text()
    assert squares(program, 96)


def transfers(program):
    """How many blocks are computed before each permute that is in no loop; and the loops that have permutes."""
    before, found, rings = {}, [], []  # for each variable, the blocks computed before it
    for number, equation in enumerate(program.eqns):
        seen = set().union(*(before.get(var, set()) for var in equation.invars if not hasattr(var, "val")))
        bodies = [body.jaxpr for name, body in equation.params.items() if name == "body_jaxpr"]
        rings += [body for body in bodies if any(inner.primitive.name == "ppermute" for inner in body.eqns)]
        if equation.primitive.name == "ppermute":
            found += [len(seen)]
        before |= {var: seen | ({number} if bodies else set()) for var in equation.outvars}
    return Counter(found), rings


def ring_program(shards):
    attend = functools.partial(ring_attention, axis="context", causal=True, largest_tile=4)
    operands = [np.zeros((1, 8, 2, HEAD_DIM), np.float32)] * 4
    with_axis = jax.make_jaxpr(functools.partial(with_gradients, attend), axis_env=[("context", shards)])
    return with_axis(*operands).jaxpr


def test_the_next_block_travels_beside_the_computation():
    """No transfer of keys and values depends on a product, and no gradient's on the block it travels beside."""
    found, rings = transfers(ring_program(3))
    # Gradients of the block that is n hops away have seen n + 1 blocks backward, after all 3 of them forward.
    assert found == Counter({0: 8}) + Counter({5: 2, 6: 2})
    assert rings == []


@pytest.mark.parametrize("shards", [8, 64])
def test_blocks_alike_are_a_loop_in_which_transfers_wait_for_nothing(shards):
    """However large the ring, the program has the same hops."""
    found, rings = transfers(ring_program(shards))
    assert found.total() == 2 + 4 + 4
    assert [transfers(ring)[0] for ring in rings] == [Counter({0: 2}), Counter({0: 4})]


def counted(monkeypatch, placement, *, context=4, length=LENGTH):
    """Per shard: score cells that count, and cells computed, of one causal sequence and one head."""
    cells, computed = Counter(), Counter()
    update = online_softmax.update

    def record(shard, number, area):
        cells[int(shard)] += int(number)
        computed[int(shard)] += int(area)

    def counting(state, query, key, value, *, view, rule):
        visible = allowed(rule, view)
        assert visible is not None
        area = query.shape[3] * key.shape[2]
        jax.debug.callback(functools.partial(record, area=area), jax.lax.axis_index("context"), visible.sum())
        return update(state, query, key, value, view=view, rule=rule)

    monkeypatch.setattr(online_softmax, "update", counting)
    operands = [x[:1, :, :1] for x in arrays(1, length=length)[:3]]
    attend = attention_of("ring", context, placement=placement, causal=True, largest_tile=length // (2 * context))
    attend = functools.partial(attend, batch_axes=())
    jax.block_until_ready(jax.jit(attend)(*operands))
    jax.effects_barrier()
    assert sum(cells.values()) == length * (length + 1) // 2
    return [[each[shard] for shard in range(context)] for each in (cells, computed)]


def test_equal_work_for_zigzag(monkeypatch):
    """Each shard computes 2c + 1 of the (2c)^2 tiles, and they hold the same number of cells that count."""
    cells, computed = counted(monkeypatch, "zigzag")
    assert cells == [132] * 4
    assert computed == [9 * (LENGTH // 8) ** 2] * 4


def test_nearly_equal_work_for_striped(monkeypatch):
    cells, computed = counted(monkeypatch, "striped")
    assert max(cells) - min(cells) <= LENGTH
    assert len(set(computed)) == 1


def test_unequal_work_for_contiguous(monkeypatch):
    """Negative control: the last of four shards has 228 of 528 cells."""
    cells, computed = counted(monkeypatch, "contiguous")
    assert cells == [36, 100, 164, 228]
    assert max(computed) > 4 * min(computed)
