"""An explanation adds up, goes into JSON, and gives a reason on every line."""

import json

import optax
import pytest

import shardlib as sl
from shardlib.explanation import bytes_text
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
