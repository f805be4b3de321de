"""Every test sees 8 emulated CPU devices; rank promotion is an error; too few devices fail, never skip.

`--shard 2/4` runs the second quarter of the collected tests, so that the exhaustive tier can be run in parts.
"""

import os

import jax
import pytest

# JAX 0.10 compiles CPU programs twice as fast without these; later versions do not know the flag. Read when the first
# device is asked for.
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
NUM_DEVICES = 8
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Halves the time of every compilation; partitioning and collectives are the same. Tests that measure what the
# optimizer does ask for the fixture `optimized`.
jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", help="I/N: run every N-th collected test, from the I-th")


@pytest.fixture
def optimized():
    """Programs compiled in this test are optimized as a user's are."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def pytest_sessionstart(session):
    assert len(jax.devices()) == NUM_DEVICES, f"{len(jax.devices())} devices, the tests need {NUM_DEVICES}"


def pytest_collection_modifyitems(config, items):
    index, _, count = config.getoption("--shard").partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard {config.getoption('--shard')}: write I/N with 1 <= I <= N")
    items[:] = items[int(index) - 1 :: int(count)]
