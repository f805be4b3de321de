"""Field troubles, group DON: a donation that is not used is named."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.audit.donation import check_donations, unused_donations


def compiled(out):
    """A step on fsdp=8 whose results have the given specs; `never` is donated and not read."""
    mesh = sl.make_mesh("fsdp=8")
    where = sl.shardings({"kept": P("fsdp"), "moved": P("fsdp"), "never": P("fsdp")}, mesh)
    state = {name: jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sharding) for name, sharding in where.items()}
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sl.shardings(P(), mesh))
    step = lambda state, x: {name: state[name] + x for name in ("kept", "moved")}  # noqa: E731
    return jax.jit(step, donate_argnums=0, out_shardings=sl.shardings(out, mesh)).lower(state, x).compile()


@pytest.mark.newest
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_don_03_a_donation_that_is_not_used_is_named_with_its_bytes():
    program = compiled({"kept": P("fsdp"), "moved": P()})
    moved, never = unused_donations(program)
    assert (moved.path, moved.shape, moved.bytes_per_device) == ("0/moved", (16, 32), 16 * 32 * 4 // 8)
    assert (never.path, never.reason) == ("0/never", "the program never reads it")
    with pytest.raises(
        sl.ShardingError, match=r"0/moved \[16, 32\]: 256 bytes on each device, no result has its bytes"
    ):
        check_donations(program)


def test_don_03_used_donations_are_not_named():
    assert [unused.path for unused in unused_donations(compiled({"kept": P("fsdp"), "moved": P("fsdp")}))] == [
        "0/never"
    ]
    mesh = sl.make_mesh("fsdp=8")
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sl.shardings(P("fsdp"), mesh))
    for donated in ((), (0,)):
        program = jax.jit(lambda x: x + 1, donate_argnums=donated).lower(x).compile()
        assert unused_donations(program) == ()
        check_donations(program)
