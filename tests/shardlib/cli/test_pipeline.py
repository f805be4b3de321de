"""Pipelines from the command line: training with the losses of one device, what explain says, every wrong input."""

import json

import jsonschema
import pytest

from shardlib.pipeline import build

LAYERED = """
import flax.linen as nn
import jax.numpy as jnp
import optax
from shardlib import Loss, annotate
from shardlib.annotate import constrain, logical
from shardlib.examples.tiny import tiny
normal = nn.initializers.normal(0.1)
class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(16, use_bias=False, kernel_init=logical(normal, "embed", "mlp"))(x)
        h = nn.Dense(8, use_bias=False, kernel_init=logical(normal, "mlp", "embed"))(jnp.tanh(h))
        return constrain(x + h, "batch", "length", "embed"), None
class Model(nn.Module):
    layers: int
    scanned: bool = True
    @nn.compact
    def __call__(self, inputs):
        x = nn.Embed(256, 8, embedding_init=logical(normal, "vocab", "embed"))(inputs)
        if self.scanned:
            stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers,
                            metadata_params={nn.PARTITION_NAME: "layers"})
            x, _ = stack(name="layers")(x, None)
        else:
            for _ in range(self.layers):
                x, _ = Layer()(x, None)
        return nn.Dense(256, use_bias=False, kernel_init=logical(normal, "embed", "vocab"), name="head")(x)
def made(model):
    _, _, spec = tiny()
    def loss(params, batch, rng):
        logits = model.apply({"params": params}, batch["inputs"])
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return Loss(total=errors.sum(), weight=jnp.float32(errors.size))
    return model, loss, spec
def four(): return made(Model(4))
def five(): return made(Model(5))
def loose(): return made(Model(4, scanned=False))
"""
SMALL = ("--batch", "8", "--length", "16")
CONV = "models.convnet:small"


@pytest.fixture
def staged(cli, user_file):
    """`staged("explain", "four", ...)` on the models above."""
    user_file("mine", LAYERED)
    return lambda command, name, *options: cli(command, name if ":" in name else f"mine:{name}", *options)


def complain(result, *parts: str) -> None:
    lines = result.err.splitlines()
    assert (result.status, result.out) == (2, ""), result
    assert len(lines) <= 10
    assert "Traceback" not in result.err
    assert "fix: " in result.err
    assert all(part in result.err for part in parts), result.err


@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "stage=4,data=2", "--schedule", "1f1b", "--microbatches", "4"),
        ("--mesh", "stage=2", "--chunks", "2", "--microbatches", "4", "--residuals", "stage", "--idle", "mask"),
    ],
    ids=["1f1b", "interleaved"],
)
def test_training_has_the_losses_of_one_device(staged, cli, options):
    result = staged("train", "four", *options, "--steps", "2", *SMALL, "--oracle", "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    jsonschema.validate(found, json.loads(cli("train", "--json-schema").out))
    assert found["oracle"]["equal"] is True
    assert found["losses"][1] != found["losses"][0]
    assert any(line.startswith("cut at: a scan of 4 steps over layers/Dense_0/kernel") for line in found["plan"])


def test_explain_says_what_was_cut_and_what_it_costs(staged):
    result = staged("explain", "four", "--mesh", "stage=4,data=2", "--microbatches", "8")
    assert result.status == 0
    words = " ".join(result.out.split())
    for part in (
        "cut at a scan of 4 steps over layers/Dense_0/kernel, layers/Dense_1/kernel (mine.py:24)",
        "layers 4, with 2 parameters each under layers/: Dense_0/kernel, Dense_1/kernel",
        "message float32[1, 128, 8], 4.0 KiB per microbatch",
        "side inputs none",
        "what comes before the layers costs 0.00 layers, what comes after them 8.00",
        "balance even: largest load 3.00 of the mean, the least there can be",
        "for 7 microbatches that wait for their backward pass: the input of every layer of each, 28.0 KiB on every",
        "ticks 14; stages are idle",
        "3 3 9.00 256 1",
    ):
        assert part in words, part


def test_json_fits_the_schema(staged, cli):
    found = json.loads(staged("explain", "five", "--mesh", "stage=3", "--batch", "12", "--json").out)
    jsonschema.validate(found, json.loads(cli("explain", "--json-schema").out))
    pipeline = found["pipeline"]
    assert (pipeline["num_layers"], pipeline["padded_rows"], pipeline["num_rows"]) == (5, 1, 6)
    assert (
        sum(stage["layer_parameters"] for stage in pipeline["stages"]) + pipeline["other_parameters"]
        == (found["num_parameters"])
    )
    assert [stage["layers"] for stage in pipeline["stages"]] == [[[0, 2]], [[2, 4]], [[4, 5]]]


def test_a_table_in_a_file(staged, tmp_path):
    (tmp_path / "mine.csv").write_text(build("gpipe", stages=2, microbatches=4).to_csv().split("\n", 1)[1])
    mesh = ("--mesh", "stage=2", *SMALL)
    found = json.loads(staged("explain", "four", *mesh, "--schedule", "mine.csv", "--json").out)
    assert (found["pipeline"]["schedule"], found["pipeline"]["num_microbatches"]) == ("mine", 4)
    complain(
        staged("explain", "four", *mesh, "--schedule", "mine.csv", "--microbatches", "8"),
        "--microbatches 8, but mine.csv has 4",
    )
    complain(
        staged("explain", "four", "--mesh", "stage=4", "--schedule", "mine.csv"),
        "is for 2 stages and 4 microbatches; the plan has stage=4",
    )
    (tmp_path / "wrong.csv").write_text("F0,B0\nB0,F0\n")
    complain(staged("explain", "four", *mesh, "--schedule", "wrong.csv"), "wrong")


def test_the_number_of_microbatches_is_chosen_and_said(staged):
    result = staged("explain", "four", "--mesh", "stage=2,data=2", "--json")
    assert json.loads(result.out)["pipeline"]["num_microbatches"] == 8
    assert "note: 8 microbatches, as --microbatches is not given: the largest multiple of stage=2" in result.err
    complain(
        staged("explain", "four", "--mesh", "stage=4", "--batch", "6"),
        "no multiple of stage=4 divides the 6 rows of a data shard",
        "fix: --batch 8, or a number of microbatches that divides the rows: --microbatches 6",
    )


def test_a_pipeline_beside_another_mesh(staged):
    options = ("--mesh", "stage=4", "--versus", "data=4", "--schedule", "gpipe")
    result = staged("explain", "four", *options)
    assert result.status == 0, result.err
    assert "ticks (stage=4): " in result.out
    assert "ticks (data=4): " not in result.out


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("four", ("stage=4", "--schedule", "1f1"), ["'1f1' is unknown (did you mean '1f1b'?)"]),
        ("four", ("stage=8",), ["4 layers cannot fill 8 stages", "fix: use stage=4"]),
        ("four", ("stage=2", "--chunks", "2", "--microbatches", "3"), ["fix: --microbatches 4"]),
        ("four", ("stage=2", "--schedule", "gpipe", "--chunks", "2"), ["fix: --chunks 1, or leave it out"]),
        ("four", ("stage=2", "--schedule", "zb_h1"), ["splits the backward pass", "fix: use gpipe, 1f1b"]),
        ("four", ("stage=2", "--schedule", "no.csv"), ["cannot read no.csv: No such file"]),
        ("four", ("stage=2", "--residuals", "ful"), ["'ful' is unknown (did you mean 'full'?)"]),
        ("four", ("stage=2", "--balance", "evn"), ["--balance", "'evn' is not one of 'even', 'cost'"]),
        ("four", ("data=2", "--balance", "cost"), ["--balance: for a pipeline, and mesh data=2 has no stages"]),
        ("four", ("stage=-1",), ["fix: name it: stage=4"]),
        ("loose", ("stage=2",), ["no layers to stage", "no loop at all", "layer_boundary(x)"]),
        (CONV, ("stage=2",), ["the loss updates state over the whole batch", "normalise per example (LayerNorm)"]),
    ],
)
def test_wrong_inputs(staged, name, options, parts):
    complain(staged("explain", name, "--mesh", *options), *parts)
