"""Published systems for sequences, reproduced: BLoad, DHP, multi-time-step RNNs and LSTMs over parallel streams."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes import make_mesh
from shardlib.annotate import reference_attention
from shardlib.audit.hlo import parse
from shardlib.data.group_layout import Programs, arrange
from shardlib.data.length_groups import Costs, Group, Grouping, plan_groups
from shardlib.data.packing import pack
from shardlib.layers import recurrent_cells as cells
from shardlib.ops.linear_recurrence import context_recurrence, context_windows
from shardlib.ops.ring_attention import ring_attention
from shardlib.ops.ring_groups import group_ranks
from tests.oracle import assert_losses_equal, assert_trees_equal
from tests.sequences import QUICK, run

VOCAB, EMBED, HIDDEN = 32, 6, 5


# BLoad (Ruschel et al. 2023, 2310.10879)


def lengths_of(count, *, most, seed=0):
    """Lengths of which many are short."""
    return np.clip(np.random.RandomState(seed).lognormal(math.log(most / 6), 1.0, count), 2, most).astype(int)


def test_bload_pads_a_hundredth_of_what_sequences_alone_would():
    length = 128
    lengths = lengths_of(3000, most=length)
    batches = list(pack([np.full(size, 1) for size in lengths], length=length, batch=8, ranks=8))
    padding = sum(int((batch["segment_ids"] == 0).sum()) for batch in batches)
    assert sum(int((batch["segment_ids"] > 0).sum()) for batch in batches) == lengths.sum()
    assert padding <= 0.01 * (length - lengths).sum()


def test_bload_gives_every_rank_the_same_steps():
    length, batch, ranks = 32, 16, 8
    batches = list(pack([np.arange(n) for n in lengths_of(300, most=length)], length=length, batch=batch, ranks=ranks))
    assert {leaf.shape for each in batches for leaf in each.values()} == {(batch, length)}
    rows = [(each["segment_ids"] > 0).any(axis=1).reshape(ranks, -1).sum(axis=1) for each in batches]
    assert all((each == batch // ranks).all() for each in rows[:-1])
    assert rows[-1].max() - rows[-1].min() <= 1


def lstm_logits(params, batch):
    """An LSTM language model; one stream."""
    x = params["table"][batch["inputs"]]
    hidden, _ = cells.stream_lstm(x[None], *params["lstm"], positions=batch["positions"])
    return hidden[0] @ params["head"]


def attention_logits(params, batch):
    """One layer of causal attention with learned positions."""
    x = params["table"][batch["inputs"]] + params["positions"][batch["positions"]]
    query, key, value = jnp.moveaxis(jnp.einsum("ble,exhd->blxhd", x, params["projections"]), 2, 0)
    seen = reference_attention(query, key, value, causal=True, segment_ids=batch["segment_ids"])
    return jnp.einsum("blhd,hdv->blv", seen, params["out"])


def token_loss(logits, batch):
    """Summed over targets, and their number."""
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return (nll * batch["weights"]).sum()


def normal(*shape, seed=0):
    return (0.5 * np.random.default_rng([seed, *shape]).normal(size=shape)).astype(np.float32)


MODELS = {
    "lstm": (
        lstm_logits,
        {
            "table": normal(VOCAB, EMBED),
            "lstm": (normal(1, EMBED, 4, HIDDEN), normal(1, HIDDEN, 4, HIDDEN), normal(1, 4, HIDDEN)),
            "head": normal(HIDDEN, VOCAB),
        },
    ),
    "attention": (
        attention_logits,
        {
            "table": normal(VOCAB, EMBED),
            "positions": normal(16, EMBED),
            "projections": normal(EMBED, 3, 2, 4),
            "out": normal(2, 4, VOCAB),
        },
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_bload_packed_loss_is_the_loss_of_sequences_alone(model):
    logits, params = MODELS[model]
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, VOCAB, size) for size in (2, 3, 5, 7, 11, 13, 16, 4, 6, 9)]
    (packed,) = pack(documents, length=16, batch=8, ranks=8)
    # Alone: one row a document, padded at the end, where causality hides the padding.
    alone = {name: np.zeros((len(documents), 16), leaf.dtype) for name, leaf in packed.items()}
    for row, document in enumerate(documents):
        size = len(document)
        alone["inputs"][row, :size] = document
        alone["targets"][row, : size - 1], alone["weights"][row, : size - 1] = document[1:], 1
        alone["positions"][row] = np.arange(16)
    assert (packed["segment_ids"].max(axis=1) > 1).any()
    loss_and_grad = jax.value_and_grad(lambda params, batch: token_loss(logits(params, batch), batch))
    (value, grads), (wanted, wanted_grads) = run(
        lambda params, a, b: (loss_and_grad(params, a), loss_and_grad(params, b)), params, packed, alone
    )
    assert_losses_equal(value, wanted)
    assert_trees_equal(grads, wanted_grads, model)
    # Negative control: documents that reach into each other have another loss.
    blind = packed | {"segment_ids": np.ones_like(packed["segment_ids"]), "positions": alone["positions"][:8]}
    assert abs(run(lambda params, batch: token_loss(logits(params, batch), batch), params, blind) / wanted - 1) > 1e-5


# DHP (Niu et al. 2026, 2602.21788)

HEADS, HEAD_DIM, TOKENS_PER_RANK = 2, 4, 6


@functools.cache
def grouped_program(degrees):
    """(query, key, value, cotangent, batch) over all ranks -> attention, its gradients, each rank's group's tokens."""
    mesh = make_mesh("context=8")

    def local(query, key, value, out, batch):
        attend = functools.partial(ring_attention, axis="context", degrees=degrees, causal=True, **batch)
        found, backward = jax.vjp(lambda *qkv: attend(*(x[None] for x in qkv))[0], query, key, value)
        tokens = jax.lax.psum((batch["segment_ids"] > 0).sum(), "context", axis_index_groups=group_ranks(degrees))
        return found, backward(out), tokens[None]

    specs = (P("context"),) * 4 + (P(None, "context"),)
    outs = (P("context"), (P("context"),) * 3, P("context"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)


def labels_of(batch):
    return {name: batch[name] for name in ("segment_ids", "positions")}


def table_attention(query, key, value, ids):
    """The same of all documents one behind the other, on one device."""
    step = jnp.arange(len(ids))
    seen = (ids[:, None] == ids[None]) & (step[:, None] >= step[None])
    scores = jnp.einsum("qhd,khd->qhk", query, key) / math.sqrt(HEAD_DIM)
    return jnp.einsum("qhk,khd->qhd", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), value)


@pytest.mark.parametrize(
    ("groups", "placement"),
    [
        ((Group(degree=5, sequences=(0, 3)), Group(degree=3, sequences=(1, 2))), "contiguous"),
        (
            (Group(degree=5, sequences=(0,)), Group(degree=2, sequences=(1, 3)), Group(degree=1, sequences=(2,))),
            "striped",
        ),
    ],
)
def test_dhp_rings_of_unequal_sizes_attend_as_one_device(groups, placement):
    lengths = (25, 8, 6, 3)
    starts = np.cumsum([1, *lengths[:-1]])  # token ids are rows of a table; row 0 is padding
    documents = [np.arange(start, start + size) for start, size in zip(starts, lengths, strict=True)]
    grouping = Grouping(groups=groups, seconds=0.0)
    batch = arrange(documents, grouping, tokens_per_rank=TOKENS_PER_RANK, placement=placement)
    rows = batch["inputs"][0]
    tables = [normal(1 + sum(lengths), HEADS, HEAD_DIM, seed=seed) for seed in range(4)]
    real = batch["segment_ids"][0] > 0
    cotangent = np.where(real[:, None, None], tables[3][rows], 0)
    operands = (*(table[rows] for table in tables[:3]), cotangent, labels_of(batch))
    found, grads, tokens = run(grouped_program(grouping.degrees), *operands)
    ids = np.repeat(np.arange(len(lengths)), lengths)

    def one_device(query, key, value, out):
        found, backward = jax.vjp(lambda *qkv: table_attention(*qkv, ids), query, key, value)
        return found, backward(out)

    wanted = run(one_device, *(table[1:] for table in tables))
    back = np.argsort(rows[real])  # from the order of storage to the order of the table
    got = jax.tree.map(lambda x: np.asarray(x)[real][back], (found, grads))
    assert_trees_equal(got, jax.tree.map(np.asarray, wanted), "attention")
    # One ring finds the same by the segment ids. Negative control: rings that cut a group see too little.
    one_ring, halves = (np.asarray(run(grouped_program(sizes), *operands)[0]) for sizes in ((8,), (4, 4)))
    np.testing.assert_allclose(one_ring[real], np.asarray(found)[real], atol=1e-5)
    assert np.abs(halves[real] - np.asarray(found)[real]).max() > 1e-2
    of_group = [sum(lengths[i] for i in group.sequences) for group in groups]
    assert np.asarray(tokens).tolist() == np.repeat(of_group, grouping.degrees).tolist()


def test_dhp_sends_around_rings_and_nothing_else():
    """The longest ring decides how often: four hops of keys and values in a ring of five. All ranks know all labels."""
    width = 8 * TOKENS_PER_RANK
    batch = {name: jax.ShapeDtypeStruct((1, width), jnp.int32) for name in ("segment_ids", "positions")}
    operands = [jax.ShapeDtypeStruct((width, HEADS, HEAD_DIM), jnp.float32)] * 4
    lowered = jax.jit(lambda *x: grouped_program((5, 3))(*x)[0]).lower(*operands, batch)
    program = parse(str(lowered.compile(compiler_options=QUICK).as_text()))
    assert set(program.totals) == {"collective-permute", "all-gather"}
    assert program.totals["collective-permute"].times_executed == 4 * 2
    assert program.totals["all-gather"].operand_bytes == 2 * 4 * TOKENS_PER_RANK
    rings = {(a, b) for pairs in (each.pairs for each in program.collectives) for a, b in pairs}
    assert rings == {(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (5, 6), (6, 7), (7, 5)}


def test_dhp_compiles_once_per_degrees():
    costs = Costs(pair_seconds=1.0, token_seconds=10.0, sent_token_seconds=15.0, hop_seconds=40.0)
    traced, run_of = [], {}

    def make(degrees):
        traced.append(degrees)
        width = 8 * TOKENS_PER_RANK
        shapes = [jax.ShapeDtypeStruct((width, 1, 1), jnp.float32)] * 4
        batch = {name: jax.ShapeDtypeStruct((1, width), jnp.int32) for name in ("segment_ids", "positions")}
        return jax.jit(lambda *x: grouped_program(degrees)(*x)[2]).lower(*shapes, batch).compile()

    programs = Programs(make)
    for seed in range(12):
        lengths = np.random.RandomState(seed).choice([2, 3, 20], size=5, p=[0.5, 0.3, 0.2]).tolist()
        lengths = lengths if sum(lengths) <= 40 else [20, 3, 3]
        grouping = plan_groups(lengths, ranks=8, tokens_per_rank=TOKENS_PER_RANK, costs=costs)
        batch = arrange([np.arange(n) for n in lengths], grouping, tokens_per_rank=TOKENS_PER_RANK)
        x = np.zeros((batch["inputs"].size, 1, 1), np.float32)
        tokens = programs(grouping.degrees)(x, x, x, x, labels_of(batch))
        run_of.setdefault(grouping.degrees, []).append(seed)
        assert tokens[0] == sum(lengths[i] for i in grouping.groups[0].sequences)
    assert programs.num_made == len(run_of) == len(set(traced)) == len(traced)
    assert 2 <= programs.num_made < 12


# Single-stream recurrent networks, many time steps at once (Sung and Park 2018, 1803.11389)

LENGTH, WIDTH = 16, 2
CELLS = {
    "sru": (cells.sru, (normal(EMBED, 4, HIDDEN), normal(2, HIDDEN))),
    "qrnn": (cells.qrnn, (normal(WIDTH, EMBED, 3, HIDDEN), normal(3, HIDDEN))),
}


def in_blocks(kind, steps):
    """A function of x [batch, length, embed] that takes `steps` time steps at once."""
    layer, parameters = CELLS[kind]

    def apply(x):
        state, found = None, []
        for start in range(0, x.shape[1], steps):
            hidden, state = layer(x[:, start : start + steps], *parameters, state=state)
            found.append(hidden)
        return jnp.concatenate(found, axis=1)

    return apply


@pytest.mark.parametrize("kind", CELLS)
def test_mts_blocks_of_any_size_equal_single_steps(kind):
    """And the weights are read once per block: one product each."""
    x = normal(1, LENGTH, EMBED)
    one, *others = run(lambda x: [in_blocks(kind, steps)(x) for steps in (1, 3, 4, 16)], x)
    for found in others:
        assert_trees_equal(np.asarray(found), np.asarray(one), kind)
    for steps in (1, 3, 4, 16):
        equations = jax.make_jaxpr(in_blocks(kind, steps))(x).eqns
        assert sum(e.primitive.name == "dot_general" for e in equations) == math.ceil(LENGTH / steps)


@pytest.mark.parametrize("kind", CELLS)
def test_mts_a_divided_sequence_sends_carries_only(kind):
    mesh = make_mesh("context=4", devices=jax.devices()[:4])
    layer, parameters = CELLS[kind]
    options = {"recurrence": functools.partial(context_recurrence, mesh=mesh)}
    if kind == "qrnn":
        options["windows"] = functools.partial(context_windows, mesh=mesh)
    carries = 3 * 2 * HIDDEN * 4 + (EMBED * (WIDTH - 1) * 4 if kind == "qrnn" else 0)
    for length in (16, 64):
        x = jax.ShapeDtypeStruct((1, length, EMBED), jnp.float32, sharding=NamedSharding(mesh, P(None, "context")))
        lowered = jax.jit(lambda x: layer(x, *parameters, **options)[0]).lower(x)
        (total,) = parse(str(lowered.compile(compiler_options=QUICK).as_text())).totals.items()
        assert total[0] == "collective-permute"
        assert total[1].operand_bytes == carries


# LSTMs over parallel streams (Bouaziz et al. 2016, 1702.03402)

STREAMS, BATCH, CLASSES = 8, 2, 7
STREAM_PARAMETERS = (
    normal(STREAMS, EMBED, 4, HIDDEN),
    normal(STREAMS, HIDDEN, 4, HIDDEN, seed=1),
    normal(STREAMS, 4, HIDDEN),
)
STREAM_HEAD = normal(STREAMS, HIDDEN, CLASSES), normal(CLASSES)


def streams(x, parameters, head):
    """Logits [batch, length, classes] of x [stream, batch, length, embed]."""
    return cells.stream_head(cells.stream_lstm(x, *parameters)[0], *head)


def test_plstm_eight_streams_on_eight_devices():
    mesh = make_mesh("tensor=8")
    x = normal(STREAMS, BATCH, LENGTH, EMBED)
    placed, whole = NamedSharding(mesh, P("tensor")), NamedSharding(mesh, P())
    shardings = (placed, (placed,) * 3, (placed, whole))
    operands = x, STREAM_PARAMETERS, STREAM_HEAD
    compiled = (
        jax.jit(streams, in_shardings=shardings, out_shardings=whole).lower(*operands).compile(compiler_options=QUICK)
    )
    totals = parse(str(compiled.as_text())).totals
    assert {kind: (each.times_executed, each.operand_bytes) for kind, each in totals.items()} == {
        "all-reduce": (1, BATCH * LENGTH * CLASSES * 4)
    }
    on_devices = jax.device_put(operands, shardings)
    for leaf in on_devices[1]:
        assert leaf.addressable_shards[0].data.nbytes * 8 == leaf.nbytes
    # A Python loop over the streams.
    each = jax.jit(lambda x, *leaves: cells.stream_lstm(x[None], *(leaf[None] for leaf in leaves))[0][0])
    hidden = [each(x[k], *(leaf[k] for leaf in STREAM_PARAMETERS)) for k in range(STREAMS)]
    wanted = (
        sum(np.asarray(h) @ kernel for h, kernel in zip(hidden, STREAM_HEAD[0], strict=True))
        + STREAM_HEAD[1][None, None]
    )
    assert_trees_equal(np.asarray(compiled(*on_devices)), wanted, "logits")


def test_plstm_gradients_stay_with_their_stream():
    """Backward sends what forward sends, no weight's gradient."""
    mesh = make_mesh("tensor=8")
    x = normal(STREAMS, BATCH, LENGTH, EMBED)
    placed, whole = NamedSharding(mesh, P("tensor")), NamedSharding(mesh, P())

    def gradients(x, parameters, head):
        return jax.grad(lambda parameters: (streams(x, parameters, head) ** 2).sum())(parameters)

    shardings = (placed, (placed,) * 3, (placed, whole))
    compiled = jax.jit(gradients, in_shardings=shardings, out_shardings=(placed,) * 3)
    compiled = compiled.lower(x, STREAM_PARAMETERS, STREAM_HEAD).compile(compiler_options=QUICK)
    totals = parse(str(compiled.as_text())).totals
    assert {kind: (each.times_executed, each.operand_bytes) for kind, each in totals.items()} == {
        "all-reduce": (1, BATCH * LENGTH * CLASSES * 4)
    }
    found = compiled(*jax.device_put((x, STREAM_PARAMETERS, STREAM_HEAD), shardings))
    wanted = run(gradients, x, STREAM_PARAMETERS, STREAM_HEAD)
    assert_trees_equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted), "gradients")
