"""Every option of a pipeline beside every other: three optimizer steps equal one device, in losses, gradients and
parameters.

The default tier runs a covering array of pairs and a few corners; the exhaustive tier the product of what decides the
program of the ticks, while what decides the model goes round. Schedules are discovered.
"""

import functools
import itertools

import optax
import pytest

from meshes import ShardingError
from models import gpt, gpt_nnx, llama
from shardlib.pipeline.schedules import ALL
from shardlib.staging import check_executable
from tests import covering
from tests.shardlib.pipeline_execution import reference, towers

SIZES = {"batch": reference.SLICES, "embed": 16, "heads": 4, "mlp": 32, "vocab": 32, "length": 8}
BALANCE = 0.1
MODELS = {
    "tower": functools.partial(towers.build, balance=BALANCE),
    "gpt": functools.partial(gpt.small, **SIZES),
    "gpt_nnx": functools.partial(gpt_nnx.small, **SIZES),
    "llama": functools.partial(llama.tiny, **SIZES),
}


def is_executable(schedule):
    size = {"stages": 2, "microbatches": 4, "chunks": schedule.default_chunks}
    try:
        check_executable(schedule.build(**size))
    except ShardingError:
        return False
    return True


SCHEDULES = {schedule.name: schedule for schedule in ALL if is_executable(schedule)}
OPTIONS = {"dropout": [0.1, 0.0], "tied": [True, False], "objective": ["weights", "clip", "plain"]}
# In the default tier each model has its options, so that few programs run on one device.
PRESETS = {
    "tower": {"dropout": 0.1, "tied": True, "objective": "weights"},
    "gpt": {"dropout": 0.0, "tied": True, "objective": "clip"},
    "gpt_nnx": {"dropout": 0.1, "tied": False, "objective": "plain"},
    "llama": {"dropout": 0.0, "tied": True, "objective": "weights"},
}
FACTORS = {
    "mesh": ["stage=4,data=2", "stage=2,data=2,tensor=2", "stage=2,replica=2,fsdp=2", "stage=8", "stage=4,tensor=2"],
    "schedule": list(SCHEDULES),
    "model": ["tower", "gpt", "gpt_nnx", "llama"],
    "residuals": ["full", "none", "dots"],
    "layers": [8, 7],
    "microbatches": [4, 8],
    "idle": ["skip", "mask"],
}
FIRST = {factor: values[0] for factor, values in FACTORS.items()}
CORNERS = [
    {**FIRST, "mesh": "stage=8", "schedule": "1f1b", "model": "llama", "microbatches": 16, "residuals": "dots"},
    {**FIRST, "mesh": "stage=4,tensor=2", "layers": 7, "microbatches": 1, "residuals": "none"},
]


def options_of(case):
    return {name: case.get(name, default) for name, default in PRESETS[case["model"]].items()}


def sizes(mesh):
    return {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}


def valid(case):
    schedule, mesh = SCHEDULES[case["schedule"]], sizes(case["mesh"])
    stages, shards = mesh.pop("stage"), 1
    for axis in ("replica", "data", "fsdp"):
        shards *= mesh.get(axis, 1)
    size = {"stages": stages, "chunks": schedule.default_chunks, "microbatches": case["microbatches"]}
    return (
        schedule.why_not(**size) is None
        and stages * schedule.default_chunks <= case["layers"]
        and reference.SLICES % (shards * case["microbatches"]) == 0
        and (case["model"] != "llama" or options_of(case)["dropout"] == 0)
    )


@functools.cache
def example(model, layers, dropout, tied, objective):
    options = {"layers": layers, "tied": tied}
    options |= {} if model == "llama" else {"dropout": dropout}
    made = MODELS[model](**options)
    return reference.weighted(made) if objective == "weights" else made


def optimizer(objective):
    if objective == "clip":
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3, eps=1e-3))
    # A rate at which rounding within the tolerance of gradients stays within that of parameters.
    return optax.sgd(0.03, momentum=0.9)


@functools.cache
def expected(*model):
    return reference.one_device(example(*model), optimizer(model[-1]))


def check(case):
    options = options_of(case)
    model = [case["model"], case["layers"], options["dropout"], options["tied"], options["objective"]]
    found = reference.pipelined(
        example(*model),
        optimizer(options["objective"]),
        mesh=case["mesh"],
        num_microbatches=case["microbatches"],
        schedule=case["schedule"],
        chunks=SCHEDULES[case["schedule"]].default_chunks,
        residuals=case["residuals"],
        idle=case["idle"],
    )
    reference.assert_equal(found, expected(*model))


def products():
    """Every valid (mesh, schedule, residuals, idle, layers), with the other factors going round in turn."""
    decisive = {name: FACTORS[name] for name in ("schedule", "residuals", "idle")}
    decisive["mesh"] = [*FACTORS["mesh"], "stage=4,fsdp=2", "stage=8", "stage=4,tensor=2"]
    decisive["layers"] = [4, 7, 8]
    others = {
        "model": list(MODELS),
        "microbatches": [16, 8, 4, 2, 1],
        **OPTIONS,
    }
    rounds = itertools.cycle(sorted(covering.product(others, valid=lambda case: True), key=lambda case: hash_of(case)))
    cases = []
    for values in covering.product(decisive, valid=lambda case: True):
        for other in itertools.islice(rounds, 200):
            if valid({**FIRST, **values, **other}):
                cases.append({**FIRST, **values, **other})
                break
    return [
        *cases,
        {**FIRST, "mesh": "stage=8", "schedule": "interleaved_1f1b", "model": "gpt", "layers": 16, "microbatches": 8},
    ]


def hash_of(case):
    """An order that mixes the factors, the same on every run."""
    return sum(ord(letter) * 7919**index % 10007 for index, letter in enumerate(covering.name(case)))


@pytest.mark.parametrize("case", covering.pairwise(FACTORS, valid=valid), ids=covering.name)
def test_pairwise(case):
    check(case)


@pytest.mark.parametrize("case", CORNERS, ids=covering.name)
def test_corners(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", products(), ids=covering.name)
def test_product(case):
    check(case)
