"""`shardlib demo`: meshes, one loss curve, from any folder. The documentation runs it with its own three meshes."""

import json

import jsonschema
import pytest

from shardlib.cli.demo import MESHES


@pytest.fixture(autouse=True)
def one_small_mesh(monkeypatch):
    assert MESHES == ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2")
    monkeypatch.setattr("shardlib.cli.demo.MESHES", ("fsdp=2",))


def test_json_fits_the_schema_and_the_mesh_agrees(cli):
    result = cli("demo", "--steps", "2", "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    jsonschema.validate(found, json.loads(cli("demo", "--json-schema").out))
    assert [run["mesh"] for run in found["runs"]] == ["fsdp=2"]
    assert found["equal"] is True


def test_other_losses_are_a_failed_check_after_the_curves(cli, monkeypatch):
    monkeypatch.setattr("shardlib.cli.train.SAME_LOSS", {"float32": -1.0})
    result = cli("demo", "--steps", "2")
    assert result.status == 1
    assert "class Tiny(nn.Module):" in result.out
    assert "one device               loss 5." in result.out
    assert "a mesh gave other losses than one device" in result.err
