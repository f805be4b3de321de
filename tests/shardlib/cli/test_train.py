"""`shardlib train`: the summary, JSON that fits its schema, the comparison with one device, a NaN loss, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys

import jsonschema

from .conftest import ROOT

SMALL = ("--batch", "8", "--length", "16")
TINY = "shardlib.examples.tiny:tiny"
USER = """
import jax, jax.numpy as jnp
from shardlib import Loss
from shardlib.examples.tiny import tiny
def turns_nan():
    model, loss, spec = tiny()
    def worse(params, batch, rng):
        value = loss(params, batch, rng)
        # The embedding table leaves its initial values after one step.
        moved = jnp.abs(params["Dense_2"]["kernel"]).max() > 0.6
        return Loss(total=value.total + jnp.where(moved, jnp.nan, 0.0), weight=value.weight)
    return model, worse, spec
def prints():
    model, loss, spec = tiny()
    def chatty(params, batch, rng):
        print("while tracing")
        jax.debug.print("while running")
        return loss(params, batch, rng)
    return model, chatty, spec
"""


def test_json_fits_the_schema_and_one_device_agrees(cli):
    result = cli("train", TINY, "--mesh", "tensor=2", "--steps", "3", *SMALL, "--oracle", "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    jsonschema.validate(found, json.loads(cli("train", "--json-schema").out))
    assert (found["mesh"], found["devices"], found["platform"], found["steps"]) == ("tensor=2", 2, "cpu", 3)
    assert len(found["losses"]) == 3
    assert found["losses"][-1] < found["losses"][0]
    assert found["oracle"]["equal"] is True
    assert found["oracle"]["max_relative_difference"] <= found["oracle"]["tolerance"]


def test_summary_in_words_and_an_unequal_loss_is_a_failed_check(cli, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    monkeypatch.setattr("shardlib.cli.train.SAME_LOSS", {"float32": -1.0})
    result = cli("train", TINY, "--mesh", "data=1", "--steps", "2", *SMALL, "--data", "text.txt", "--oracle")
    assert result.status == 1
    assert result.out.startswith("mesh data=1 on 1 cpu devices, 2 steps\nloss 5.")
    assert "tokens per second" in result.out
    assert "of parameters and optimizer state per device" in result.out
    assert "DIFFERENT losses" in result.out
    assert "the losses on data=1 differ from one device's by" in result.err


def test_inferred_size_counts_the_devices(cli):
    result = cli("train", TINY, "--mesh", "data=-1,tensor=3", "--steps", "1")
    assert result.status == 2
    assert "8 devices are not a multiple of the 3 that the other axes take" in result.err


def test_nan_loss_names_its_step_and_ends_with_1(cli, user_file):
    user_file("mine", USER)
    result = cli("train", "mine:turns_nan", "--mesh", "data=1", "--steps", "9", *SMALL, "--lr", "1.0")
    assert result.status == 1
    assert result.out == ""
    assert "error: the loss of step 2 is nan (steps count from 1)" in result.err
    assert "fix: a smaller --lr" in result.err
    assert "Traceback" not in result.err


def test_what_a_loss_prints_goes_to_stderr(cli, user_file):
    user_file("mine", USER)
    result = cli("train", "mine:prints", "--mesh", "data=1", "--steps", "2", *SMALL, "--json")
    assert json.loads(result.out)["steps"] == 2
    assert "while tracing" in result.err


def test_ctrl_c_ends_with_130(tmp_path):
    command = [sys.executable, "-m", "shardlib", "train", TINY, "--mesh", "data=1", "--steps", "1000000", *SMALL]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"}
    # The module tells us when the command is at work; interrupting the interpreter's own start proves nothing.
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom shardlib.examples.tiny import tiny\nprint('ready', file=sys.stderr, flush=True)\n"
    )
    command[4] = "mine:tiny"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "ready\n"
        assert interrupted(running) == "error: interrupted\n"
        assert running.returncode == 130


def interrupted(running):
    """What a process says on Ctrl-C, pressed again when nothing happens: Python drops one that hits a destructor."""
    for _ in range(4):
        running.send_signal(signal.SIGINT)
        try:
            return running.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired:
            continue
    running.kill()
    return "still running"
