"""`shardlib explain`: the table, two meshes, the proposal, JSON that fits its schema."""

import json

import jax
import jsonschema
import pytest

TINY = "shardlib.examples.tiny:tiny"
BARE = """
import flax.linen as nn
from shardlib.examples.tiny import tiny
class Bare(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(256, name="lm_head")(nn.Embed(256, 32)(inputs))
def bare():
    model = Bare()
    return model, lambda params, batch, rng: model.apply({"params": params}, batch["inputs"]).mean(), tiny()[2]
"""


@pytest.fixture
def schema(cli):
    return json.loads(cli("explain", "--json-schema").out)


def test_every_array_with_its_reasons(cli):
    result = cli("explain", TINY, "--mesh", "fsdp=2,tensor=2")
    assert result.status == 0
    assert not result.err
    assert result.out.startswith("mesh fsdp=2,tensor=2 (4 devices), 180,224 parameters\n\nparameters\n")
    assert (
        "Embed_0/embedding float32[256, 64] (tensor, fsdp), 16.0 KiB per device\n"
        "  vocab=256  tensor  rule 'vocab -> tensor'\n"
        "  embed=64   fsdp    rule 'embed -> fsdp'\n"
    ) in result.out
    assert "optimizer state     1.4 MiB    352.0 KiB" in result.out
    assert all(line == line.rstrip() for line in result.out.splitlines())


def test_two_meshes_side_by_side(cli):
    result = cli("explain", TINY, "--mesh", "data=2,tensor=4", "--versus", "fsdp=8")
    assert result.status == 0
    row = next(line for line in result.out.splitlines() if "Dense_0/kernel" in line)
    assert row.split() == [
        "Dense_0/kernel",
        "float32[512,",
        "256]",
        "(-,",
        "tensor)",
        "128.0",
        "KiB",
        "(fsdp,",
        "-)",
        "64.0",
        "KiB",
    ]


def test_json_fits_the_schema(cli, schema):
    result = cli("explain", TINY, "--mesh", "data=2,tensor=4", "--json")
    found = json.loads(result.out)
    jsonschema.validate(found, schema)
    assert found["devices"] == 8
    assert found["totals"]["all"]["total_bytes"] == 4 * found["totals"]["parameters"]["total_bytes"] + 4


def test_json_of_two_meshes_fits_the_schema(cli, schema):
    found = json.loads(cli("explain", TINY, "--mesh", "data=2", "--versus", "fsdp=8", "--json").out)
    jsonschema.validate(found, schema)
    assert [one["mesh"] for one in found["versus"]] == ["data=2", "fsdp=8"]


def test_options_of_divided_sequences_go_to_the_mesh_that_divides_them(cli):
    example = ("models.gpt:small", "--length", "32")
    result = cli("explain", *example, "--mesh", "data=4", "--versus", "context=4", "--attention", "gather", "--json")
    assert result.status == 0, result.err
    plain, divided = (" ".join(one["choices"]) for one in json.loads(result.out)["versus"])
    assert "gather" in divided and "gather" not in plain
    refused = cli("explain", *example, "--mesh", "data=4", "--versus", "fsdp=4", "--attention", "gather")
    assert refused.status != 0
    assert "mesh data=4 has no context axis" in refused.err


def test_schema_refuses_what_it_should(cli, schema):
    found = json.loads(cli("explain", TINY, "--mesh", "data=2", "--json").out)
    del found["totals"]["gradients"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, schema)


def test_bare_model_gets_a_proposal_that_works(cli, user_file, tmp_path, schema):
    user_file("mine", BARE)
    result = cli("explain", "mine:bare", "--mesh", "tensor=2")
    assert result.status == 0
    assert "mine:bare has no logical axes" in result.err
    (tmp_path / "rules.toml").write_text(result.out)
    again = cli("explain", "mine:bare", "--mesh", "tensor=2", "--rules", "rules.toml")
    assert "lm_head/kernel float32[32, 256] (-, tensor)" in again.out
    found = json.loads(cli("explain", "mine:bare", "--mesh", "tensor=2", "--json").out)
    jsonschema.validate(found, schema)
    assert found["proposal"] == result.out


def test_sizes_and_optimizer(cli):
    result = cli("explain", TINY, "--mesh", "data=4", "--batch", "4", "--length", "32", "--optimizer", "sgd", "--json")
    found = json.loads(result.out)
    assert {entry["path"]: entry["shape"] for entry in found["batch"]} == {"inputs": [4, 32], "targets": [4, 32]}
    assert found["totals"]["optimizer_state"]["total_bytes"] == 0


def test_no_device_is_touched(cli, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("devices were asked for"))
    assert cli("explain", TINY, "--mesh", "data=32,fsdp=64,tensor=8", "--batch", "2048").status == 0
