"""The real TPU compiler takes attention by its kernels, alone and in rings; a 128k-token step of 8B fits and overlaps.

Compiling happens in a child process: a crash of the compiler ends the process it is in. Nothing runs.
"""

import json
import re
import subprocess
import sys

import pytest

from shardlib.context import AttentionCall, ContextUse, kernel_lines

FORWARD, BACKWARD = {"splash_mha_fwd_residuals"}, {"splash_mha_dq_no_residuals", "splash_mha_dkv_no_residuals"}
HBM_BYTES = 95 * 10**9  # of a v5p chip: Cloud TPU documentation, "TPU v5p"


def compiled(*arguments):
    command = [sys.executable, "-m", "tests.tpu_attention", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_step_holds_the_kernels_forward_and_backward():
    found = compiled("small", "--mesh", "fsdp=2,tensor=4", "--layers", 1)
    assert set(found["kernels"]) == FORWARD | BACKWARD


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arguments",
    [
        ("--mesh", "data=8", "--kv-heads", 4),
        ("--mesh", "fsdp=8", "--dtype", "float32"),
        ("--mesh", "data=2,fsdp=2,tensor=2", "--topology", "v5p:2x2x2"),
        # float32, because the TPU compiler adds bfloat16 operands up to a float32 result.
        ("--mesh", "stage=2,data=2,tensor=2", "--microbatches", 2, "--dtype", "float32"),
        ("--mesh", "context=4,data=2", "--attention", "all_to_all", "--length", 2048),
        ("--mesh", "context=4,data=2", "--attention", "ring", "--length", 2048),
    ],
)
def test_kernels_under_every_axis(arguments):
    assert set(compiled("small", *arguments)["kernels"]) == FORWARD | BACKWARD


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arguments", [("--head-dim", 64), ("--length", 192), ("--mesh", "context=4,data=2", "--attention", "gather")]
)
def test_what_does_not_fit_compiles_without(arguments):
    assert compiled("small", *arguments)["kernels"] == []


@pytest.mark.exhaustive
def test_128k_tokens_of_8b_on_64_chips_fit_and_the_ring_travels_beside_the_computation():
    """Layers are a loop, and in it blocks of the ring that are alike, so that the program holds few transfers.

    Keys and values: forward, and when that runs again, from the own block to the first, and in the loop; backward also
    from the first to the loop. Each runs around the computation of a block. Their gradients go on in the loop, to the
    last block and home, around a block or what else the layer computes.
    """
    ring = ("--mesh", "fsdp=4,context=8,tensor=2", "--length", 131072, "--attention", "ring")
    found = compiled("8b", "--layers", 32, "--topology", "v5p:4x4x4", *ring)
    assert found["num_parameters"] > 8.0e9
    assert (found["kind"], found["placement"]) == ("ring", "zigzag")
    assert set(found["kernels"]) >= FORWARD | BACKWARD
    assert found["argument_bytes"] + found["temp_bytes"] + found["program_bytes"] < HBM_BYTES
    assert all(each["asynchronous"] for each in found["transfers"])
    gradients = [each for each in found["transfers"] if each["dtype"] == "f32"]
    others = [each for each in found["transfers"] if each["dtype"] != "f32"]
    assert (len(others), len(gradients)) == (2 * (2 + 2 + 3), 2 * 3)
    assert all(each["blocks"] for each in others)
    assert all(each["blocks"] or each["cycles"] for each in gradients)


# What explain says


def call(**changes):
    sizes = {"query": (8, 4096, 8, 128), "key": (8, 4096, 2, 128), "causal": True, "window": None}
    return AttentionCall(**{**sizes, "has_row_mask": False, "itemsize": 2, "dtype": "bfloat16", **changes})


def ring(**changes):
    return ContextUse(
        **{"kind": "ring", "placement": "zigzag", "shards": 4, "reason": "", "short_length": 16, **changes}
    )


def test_kernels_are_named_by_target():
    assert kernel_lines([call()], None) == (
        "attention, compiled for TPU: splash attention",
        "attention, compiled for GPU: cuDNN",
    )
    assert kernel_lines([], None) == ()


@pytest.mark.parametrize(
    ("calls", "context", "words"),
    [
        ([call(dtype="float32")], None, "GPU: the reference, because cuDNN takes bfloat16 and float16"),
        ([call(), call(window=8, causal=False)], None, "GPU: cuDNN in 1 of 2 calls, else the reference, because"),
        ([call(mask=(8, 1, 4096, 4096))], None, "TPU: the reference, because splash attention takes masks of keys"),
        ([call(value=(8, 4096, 2, 96))], None, "TPU: the reference, because .* head_dim of the values is 96"),
        ([call()], ring(), "GPU: blocks in XLA, because JAX differentiates cuDNN's attention only where"),
        ([call(window=64)], ring(), "TPU: blocks in XLA, because a window of a block depends"),
        ([call()], ring(shards=32), "TPU: blocks in XLA, because half a zigzag shard of 128 tokens is no multiple"),
        ([call()], ring(kind="gather"), "TPU: blocks in XLA, because the labels of gathered keys"),
        ([call(mask=(8, 1, 1, 4096))], ring(kind="all_to_all"), "TPU: blocks in XLA, because a mask may hide"),
    ],
)
def test_what_does_not_fit_is_said(calls, context, words):
    assert any(re.search(words, line) for line in kernel_lines(calls, context)), kernel_lines(calls, context)


def test_divided_sequences_have_kernels_too():
    for context in (ring(), ring(kind="all_to_all", placement="contiguous")):
        assert "attention, compiled for TPU: splash attention" in kernel_lines([call()], context)
