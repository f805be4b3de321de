"""The real TPU compiler takes a pipelined step, and gives it less memory than GPipe by hand; nothing runs.

Compiling happens in a child process: a crash of the compiler ends the process it is in.
"""

import json
import subprocess
import sys

import pytest

from meshes import ShardingError
from meshes.devices import compile_only


def compiled(*arguments):
    command = [sys.executable, "-m", "tests.tpu_pipeline", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_pipelined_step_compiles_for_64_chips_with_one_permute_each_way():
    found = compiled("toolkit", 8)
    assert found["devices"] == 64
    assert found["permutes"] == 2


@pytest.mark.exhaustive
def test_temporaries_stay_flat_and_below_gpipe():
    few, many = (compiled("toolkit", m, "--embed", 512, "--layers", 8, "--length", 1024) for m in (8, 32))
    assert many["temp_bytes"] <= 1.01 * few["temp_bytes"]
    for form in ("every tick", "skipping"):
        plain = compiled(form, 32, "--embed", 512, "--layers", 8, "--length", 1024)
        assert many["temp_bytes"] < plain["temp_bytes"], form


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["stage=4,fsdp=16", "stage=4,data=4,tensor=4", "stage=2,fsdp=8,tensor=4"])
def test_products_of_meshes_compile(mesh):
    assert compiled("toolkit", 8, "--mesh", mesh, "--embed", 512)["permutes"] == 2


def test_an_unknown_topology_is_named():
    with pytest.raises(ShardingError, match="v5p:banana") as error:
        compile_only("v5p:banana")
    assert 'as in "v5p:4x4x4"' in str(error.value)
