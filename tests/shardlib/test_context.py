"""Divided sequences: every attention, placement and mesh trains and evaluates as one device does.

The default tier runs a few cases, the exhaustive tier a pairwise cover; the op itself is tested beside every axis in
`ops/test_context_attention.py`. One device computes dropout by the same logical slices, so that masks are equal.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from meshes.errors import ShardingError
from meshes.shape import MeshShape
from models import gpt, gpt_nnx, llama
from shardlib.batch_spec import ArraySpec
from shardlib.binding import bind
from shardlib.context import AttentionCall, ContextUse, choose_context, some_rows
from shardlib.plan import Plan
from shardlib.trainer import Trainer
from tests import covering, oracle

SLICES, NUM_STEPS = 8, 3
SIZES = {"layers": 2, "embed": 16, "heads": 8, "mlp": 32, "vocab": 32, "length": 16}
MODELS = {"gpt": gpt.small, "gpt_nnx": gpt_nnx.small, "llama": functools.partial(llama.tiny, kv_heads=4)}
FACTORS = {
    "mesh": [
        "context=4,data=2",
        "context=2,tensor=2,fsdp=2",
        "context=8",
        "stage=2,context=2,data=2",
        "stage=2,context=2,tensor=2",
    ],
    "attention": [None, "ring", "all_to_all", "gather"],
    "placement": [None, "contiguous", "zigzag", "striped"],
    "lowering": [None, "explicit"],
    "model": ["gpt", "gpt_nnx", "llama"],
    "dropout": [0.0, 0.2],
}


def valid(case):
    has_dropout = case["model"] != "llama"
    moves = case["placement"] not in (None, "contiguous")
    # Masks of dropout are drawn in the order in which tokens are held: one device's only where that is of positions.
    draws_alike = not case["dropout"] or (has_dropout and case["placement"] == "contiguous")
    return draws_alike and not (case["attention"] == "all_to_all" and moves)


@functools.cache
def model(name, dropout):
    return MODELS[name](batch=SLICES, **SIZES, **({"dropout": dropout} if dropout else {}))


def batch(step):
    return oracle.token_batch(step, batch=SLICES, length=SIZES["length"], vocab=SIZES["vocab"])


def plan_of(case):
    staged = "stage" in case["mesh"]
    return Plan(
        mesh=case["mesh"],
        attention=case["attention"],
        placement=case["placement"],
        lowering=case["lowering"],
        idle="mask" if staged and case["attention"] == "ring" else "skip",
        num_microbatches=2 if staged else 1,
        # Only dropout needs equal keys; without it the lowering stays the plan's own choice.
        random_slices=SLICES if case["dropout"] else None,
    )


class Run(NamedTuple):
    """Losses of the steps and of an evaluation; in the model's own form the first gradients and last parameters."""

    losses: list[float]
    grads: Any
    params: Any


@functools.cache
def trainer_of(plan, name, dropout):
    """Compiled once; the negative control runs the same programs."""
    module, loss, spec = model(name, dropout)
    bound = bind(module, loss, plan, spec)
    return Trainer(bound, oracle.OPTIMIZERS["sgd"], check_separable=False, check_order=False)


def run(plan, name, dropout):
    trainer = trainer_of(plan, name, dropout)
    state, losses, grads = trainer.init(jax.random.key(0)), [], None
    for step in range(NUM_STEPS):
        state, metrics = trainer.step(state, batch(step))
        losses.append(float(metrics["loss"]))
        # Of the first step, where parameters are equal: later ones carry the rounding of those before.
        grads = oracle.host(trainer.bound.restore(state.opt_state[0].grads)) if grads is None else grads
    losses.append(float(trainer.evaluate(state, batch(NUM_STEPS))["loss"]))
    return Run(losses, grads, oracle.host(trainer.bound.restore(state.params)))


@functools.cache
def one_device(name, dropout):
    return run(Plan(mesh="data=1", random_slices=SLICES if dropout else None), name, dropout)


def check(case):
    found, wanted = run(plan_of(case), case["model"], case["dropout"]), one_device(case["model"], case["dropout"])
    oracle.assert_losses_equal(found.losses, wanted.losses)
    oracle.assert_trees_equal(found.grads, wanted.grads, "gradient")
    oracle.assert_trees_equal(found.params, wanted.params, "parameter")


def case_of(*values):
    return dict(zip(FACTORS, values, strict=True))


FEW = [
    case_of("context=4,data=2", None, "zigzag", "explicit", "gpt", 0.0),
    case_of("stage=2,context=2,data=2", "gather", "striped", None, "gpt", 0.0),
]


@pytest.mark.parametrize("case", FEW, ids=covering.name)
def test_equal_to_one_device(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", covering.pairwise(FACTORS, valid=valid), ids=covering.name)
def test_pairwise(case):
    check(case)


def test_the_few_meet_every_kind_of_case():
    assert len(covering.pairwise(FACTORS, valid=valid)) <= 60
    assert {case["placement"] for case in FEW} >= {"zigzag", "striped"}


def test_a_batch_that_is_not_reordered_is_caught(monkeypatch):
    monkeypatch.setattr(ContextUse, "reordered", lambda self, batch, spec: batch)
    with pytest.raises(AssertionError):
        check(FEW[0])


# What is chosen, and why


def call(**changes):
    sizes = {"query": (8, 16, 4, 8), "key": (8, 16, 4, 8), "causal": True, "window": None}
    return AttentionCall(**{**sizes, "has_row_mask": False, "itemsize": 4, **changes})


def chosen(*calls, mesh="context=4", **changes):
    options = {"batch_shards": 1, "follows_positions": True, "in_branch": False, "kind": None, "placement": None}
    return choose_context(list(calls or (call(),)), mesh=MeshShape.parse(mesh), **{**options, **changes})


def test_the_reason_lists_every_kind_with_its_bytes():
    found = chosen()
    assert (found.kind, found.placement) == ("all_to_all", "contiguous")
    assert [line.split()[0] for line in found.reason.splitlines()] == ["all_to_all", "ring", "gather"]
    assert all(re.search(r"sends [\d.]+ MiB per layer and device", line) for line in found.reason.splitlines())
    assert chosen(kind="ring").reason.startswith("the plan says ring\n")


def test_tokens_move_only_where_the_model_follows():
    assert chosen(kind="ring").placement == "zigzag"
    assert chosen(kind="ring", follows_positions=False).placement == "contiguous"
    assert "the model has no annotate.by_position" in chosen(kind="ring", follows_positions=False).reason
    assert chosen(call(has_row_mask=True), kind="ring").placement == "contiguous"
    with pytest.raises(ShardingError, match="the model makes masks or position tables in the order of positions"):
        chosen(placement="zigzag", follows_positions=False)


def test_a_placement_chooses_among_the_kinds_that_gain():
    found = chosen(placement="zigzag")
    assert (found.kind, found.placement) == ("ring", "zigzag")
    assert found.reason.startswith("the plan says zigzag\n")
    assert chosen(placement="zigzag", in_branch=True).kind == "gather"
    with pytest.raises(ShardingError, match="attention='all_to_all' computes on whole sequences, so that placement='"):
        chosen(kind="all_to_all", placement="zigzag")


def test_no_attention_at_all_is_refused():
    with pytest.raises(ShardingError, match="divides sequences over context=4, and the loss never calls annotate"):
        choose_context(
            [],
            mesh=MeshShape.parse("context=4"),
            batch_shards=1,
            follows_positions=True,
            in_branch=False,
            kind=None,
            placement=None,
        )


@pytest.mark.parametrize("window, length", [(None, 16), (3, 16), (40, 40), (41, 48)])
def test_the_short_length_holds_a_window_and_whole_chunks(window, length):
    found = chosen(call(query=(8, 64, 4, 8), key=(8, 64, 4, 8), window=window))
    assert found.short_length == length


def test_some_rows_are_the_first_tokens_of_each():
    spec = {"x": ArraySpec(shape=(3, 8), dtype="int32", axes=("batch", "length"))}
    spec |= {"shared": ArraySpec(shape=(8,), dtype="int32", axes=("length",))}
    given = {"x": np.arange(24, dtype=np.int32).reshape(3, 8), "shared": np.arange(8, dtype=np.int32)}
    one, rows = some_rows(given, spec, length=4)
    assert one["x"].shape == (1, 4) and len(rows) == 3
    assert rows[2]["x"].tolist() == [[16, 17, 18, 19]] and rows[2]["shared"].tolist() == [0, 1, 2, 3]
    assert some_rows(given, spec, length=None)[0]["x"].shape == (1, 8)


def test_rounding_is_no_other_order():
    found = dataclasses.replace(chosen(kind="ring"))
    found.check_same_order([{"loss": 1.0}], [{"loss": 1.00005}], itemsize=4)
    found.check_same_order([{"loss": 1.0}], [{"loss": 1.005}], itemsize=2)
    with pytest.raises(ShardingError, match=r"loss of row 1 is 1, and 1.005 in the order of positions"):
        found.check_same_order([{"loss": 1.0}] * 2, [{"loss": 1.0}, {"loss": 1.005}], itemsize=4)
