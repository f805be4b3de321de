"""An explanation adds up, goes into JSON, and gives a reason on every line."""

import functools
import json

import optax
import pytest

import shardlib as sl
from models import gpt
from shardlib.explanation import bytes_text, flops_text
from tests.cases.test_rul import small_model


@pytest.mark.newest
def test_the_bytes_add_up():
    model, loss, spec = small_model()
    found = sl.bind(model, loss, sl.Plan(mesh="fsdp=2,tensor=4"), spec).explain(optax.adamw(1e-3))
    parameters = 4 * (64 * 128 + 128 * 16)
    assert found.totals["parameters"].total == found.totals["gradients"].total == parameters
    assert found.totals["parameters"].per_device == parameters // 8
    assert found.totals["optimizer_state"].total == 2 * parameters + 4  # two moments and one int32 counter
    assert found.totals["optimizer_state"].per_device == 2 * parameters // 8 + 4
    whole = found.totals["all"]
    parts = [found.totals[name] for name in ("parameters", "gradients", "optimizer_state")]
    assert (whole.total, whole.per_device) == (sum(p.total for p in parts), sum(p.per_device for p in parts))


def test_json_and_text_name_every_array_with_its_reasons():
    model, loss, spec = small_model()
    found = sl.bind(model, loss, sl.Plan(mesh="fsdp=2,tensor=4"), spec).explain()
    document = json.loads(json.dumps(found.to_json()))
    assert document["mesh"] == "fsdp=2,tensor=4"
    assert document["devices"] == 8
    up = next(entry for entry in document["parameters"] if entry["path"] == "up/kernel")
    assert up["spec"] == [["fsdp"], ["tensor"]]
    assert up["logical_axes"] == ["embed", "mlp"]
    assert up["bytes_per_device"] == 4 * 64 * 128 // 8
    assert up["reasons"] == ["rule 'embed -> fsdp'", "rule 'mlp -> tensor'"]
    text = str(found)
    for line in (
        "up/kernel float32[64, 128] (fsdp, tensor), 4.0 KiB per device",
        "embed=64: fsdp, rule 'embed -> fsdp'",
    ):
        assert line in text, text
    assert all(reason for entry in document["parameters"] + document["batch"] for reason in entry["reasons"])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 60, "5,242,880.0 TiB"),
    ],
)
def test_bytes_in_words(size, text):
    assert bytes_text(size) == text


@functools.cache
def staged(mesh, balance="even", tied=True, layers=8, residuals=None):
    """Eight layers of width 32 under a vocabulary of 512, whose head costs 1.23 layers."""
    config = gpt.Config(layers=layers, embed=32, heads=2, mlp=128, vocab=512, length=16, tied=tied)
    pipeline = {"num_microbatches": 8, "balance": balance, "residuals": residuals} if "stage" in mesh else {}
    return sl.bind(*gpt.build(config, batch=16)[:2], sl.Plan(mesh=mesh, **pipeline), gpt.build(config)[2]).explain()


@pytest.mark.newest
@pytest.mark.parametrize("tied", [True, False])
def test_a_parameter_counts_once_however_many_stages_and_padded_rows(tied):
    counts = {mesh: staged(mesh, tied=tied).num_parameters for mesh in ("data=1", "stage=2", "stage=4", "stage=3")}
    assert len(set(counts.values())) == 1, counts
    uneven = staged("stage=3", tied=tied).pipeline
    assert (uneven.padded_rows, uneven.num_rows) == (1, 9)
    whole = staged("stage=3", tied=tied)
    assert sum(stage.layer_parameters for stage in uneven.stages) + uneven.other_parameters == whole.num_parameters
    # The control: counting what is stored would count the padding.
    stored = sum(entry.size_bytes // 4 for entry in whole.parameters)
    assert stored == whole.num_parameters + uneven.padded_parameters > whole.num_parameters


@pytest.mark.newest
def test_embedding_and_head_count_in_the_balance():
    even, cost = staged("stage=4").pipeline, staged("stage=4", balance="cost").pipeline
    assert even.chosen.layers == (2, 2, 2, 2)
    products = 8 * 32**2 + 4 * 32 * 128 + 4 * 16 * 32  # per token: projections, MLP, attention
    assert even.head == pytest.approx(2 * 32 * 512 / products)
    assert even.chosen.max_over_mean == pytest.approx((2 + even.head) / (2 + even.head / 4))
    assert cost.chosen == even.by_cost
    assert sum(cost.chosen.layers) == 8
    assert cost.chosen.max_over_mean < even.chosen.max_over_mean
    assert sum(even.chosen.loads) == pytest.approx(8 + even.embedding + even.head)
    assert cost.bubble_fraction < even.bubble_fraction


@pytest.mark.newest
def test_a_pipeline_in_numbers():
    found = staged("stage=4,data=2").pipeline
    assert found.message == ("float32[1, 16, 32]",)
    assert found.message_bytes == found.cotangent_bytes == 4 * 16 * 32
    assert [stage.live_microbatches for stage in found.stages] == [7, 5, 3, 1]  # 2p-1 in a tick with F and B
    assert found.ring_bytes == 7 * 2 * found.message_bytes  # the inputs of two layers
    assert staged("stage=4,data=2", residuals="stage").pipeline.ring_bytes == 7 * found.message_bytes
    assert found.num_ticks == 8 + 2 * (4 - 1)
    # Ranks inside the line take part in permutes both ways; each way runs while some microbatch is under way.
    assert found.num_permutes == 2 * 10
    assert found.message_bytes_per_device == 20 * found.message_bytes
    assert staged("stage=4,data=2", residuals="none").pipeline.ring_bytes is None


def test_text_and_json_of_a_pipeline():
    found = staged("stage=3")
    text = str(found)
    for part in (
        "  cut at: a scan of 8 steps over layers/attention/key/kernel",
        "  balance: by cost, as 8 layers do not divide over 3 stages: largest load ",
        "  padding: 1 of 9 stored rows of every layer parameter stand for no layer; they stay zero",
        "  stage 0: layers 0-2, load 3.00 layers, ",
    ):
        assert part in text, text
    document = json.loads(json.dumps(found.to_json()))
    assert document["pipeline"]["chosen"]["max_over_mean"] == found.pipeline.chosen.max_over_mean
    assert staged("data=1").to_json()["pipeline"] is None


def test_few_microbatches_are_worth_a_notice():
    model, loss, spec = gpt.small()
    few = sl.bind(model, loss, sl.Plan(mesh="stage=4", num_microbatches=2), spec).explain()
    assert any(notice.startswith("2 microbatches on 4 stages: the stages wait for ") for notice in few.notices)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 FLOP"), (1500, "1.5 kFLOP"), (2e12, "2.0 TFLOP"), (3e9, "3.0 GFLOP")]
)
def test_flops_in_words(count, text):
    assert flops_text(count) == text
