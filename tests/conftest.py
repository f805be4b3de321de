"""Every test sees 8 emulated CPU devices; rank promotion is an error; too few devices fail, never skip."""

import jax

NUM_DEVICES = 8
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart(session):
    assert len(jax.devices()) == NUM_DEVICES, f"{len(jax.devices())} devices, the tests need {NUM_DEVICES}"
