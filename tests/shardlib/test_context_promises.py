"""What attention over divided sequences promises to send is what the compiled train step sends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt, llama
from shardlib.attention_calls import attention_calls
from shardlib.audit.contract import hold
from tests.moving import GPT, bound, compiled, gpt_program

ATTENTION = {"keys and values", "gradients of keys and values", "heads"}


def rows(mesh, **plan):
    """Rows of the contract whose promises are attention's alone; no promise is broken."""
    found, program = gpt_program(mesh, **plan)
    contract = hold(program, found.promised(), found.plan.mesh)
    assert contract.problems == (), str(contract)
    return [row for row in contract.rows if row.what and set(row.what) <= ATTENTION]


@pytest.mark.newest
@pytest.mark.parametrize(
    ("mesh", "plan", "kinds"),
    [
        ("context=4", {"attention": "ring"}, ["collective-permute"]),
        ("context=4", {"attention": "all_to_all"}, ["all-to-all"]),
        ("context=4", {"attention": "gather"}, ["all-gather", "reduce-scatter"]),
        ("context=2,fsdp=2,tensor=2", {"attention": "ring", "num_microbatches": 2}, ["collective-permute"]),
    ],
    ids=lambda value: str(value),
)
def test_attention_sends_what_is_promised(mesh, plan, kinds):
    found = rows(mesh, **plan)
    assert [row.kind for row in found] == kinds
    assert all(row.found_bytes == row.promised_bytes == row.form_bytes > 0 for row in found), found


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("context=4", {"attention": "ring", "remat": "full"}),
        ("stage=2,context=2", {"num_microbatches": 2}),
    ],
    ids=lambda value: str(value),
)
def test_recomputed_layers_send_forward_twice(mesh, plan):
    (found,) = rows(mesh, **plan)
    assert found.promised_bytes < found.found_bytes == found.form_bytes


def test_bfloat16_may_travel_in_32_bits():
    (found,) = rows("context=2,fsdp=2", attention="ring", num_microbatches=2, compute_dtype="bfloat16")
    assert found.promised_bytes <= found.found_bytes <= 2 * found.promised_bytes


def test_more_than_promised_is_seen():
    """Negative control: half of attention's promises, and none."""
    found, program = gpt_program("context=4", attention="ring")
    promises = found.promised()
    less = [replace(one, form_bytes=one.form_bytes / 2) if one.what in ATTENTION else one for one in promises]
    none = [one for one in promises if one.what not in ATTENTION]
    for broken in (less, none):
        assert hold(program, broken, found.plan.mesh).problems


def test_calls_are_counted_with_the_turns_of_their_loop():
    for example, again in ((gpt.build(gpt.Config(**GPT)), False), (llama.tiny(layers=3, remat=True), True)):
        made = bound("context=4", model=example)
        (call,) = attention_calls(made.loss, made.logical_params, made.batch_spec, None)
        assert (call.times, call.again) == (3 if again else GPT["layers"], again)


class Packed(nnx.Module):
    """One layer of attention within documents."""

    def __init__(self, rngs):
        draw = jax.random.normal(rngs.params(), (16, 4, 8))
        self.table = nnx.Param(draw, logical_axes=("vocab", "heads", "head_dim"))


def packed_loss(params, batch, rng):
    x = sl.constrain(params["table"].get_value()[batch["tokens"]], "batch", "length", "heads", "head_dim")
    return jnp.square(sl.attention(x, x, x, causal=True, segment_ids=batch["segment_ids"])).mean()


@pytest.mark.parametrize("attention", ["ring", "all_to_all", "gather"])
def test_labels_of_documents_are_promised(attention):
    tokens = sl.ArraySpec(shape=(4, 16), dtype="int32", axes=("batch", "length"))
    spec = {"tokens": tokens, "segment_ids": tokens}
    found = bound("context=4", model=(Packed, packed_loss, spec), attention=attention)
    (labels,) = (one for one in found.promised() if one.what == "token labels")
    assert labels.bytes_per_device == 3 / 4 * 4 * 4 * 16
    contract = hold(compiled(sl.Trainer(found, optax.sgd(0.1)).lowered), found.promised(), found.plan.mesh)
    assert contract.problems == (), str(contract)
    assert any("token labels" in row.what and row.found_bytes >= labels.bytes_per_device for row in contract.rows)


def test_explain_names_what_attention_sends():
    made = bound("context=4", model=gpt.build(gpt.Config(**GPT)), attention="ring")
    assert ATTENTION & {one.what for one in made.explain().promises} == ATTENTION - {"heads"}
    whole = bound("data=4", model=gpt.build(gpt.Config(**GPT)))
    assert not ATTENTION & {one.what for one in whole.explain().promises}
