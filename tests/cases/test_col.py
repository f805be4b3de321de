"""Field troubles, group COL: collectives nobody asked for."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import annotate
from shardlib.audit.hlo import parse
from shardlib.rules import Rules

RULES = Rules.parse(["batch -> data", "vocab -> model", "length -> none", "embed -> none"])


def kinds_of_embedding(rules):
    """Collectives of a lookup in a table split over its rows, by kind."""
    mesh = sl.make_mesh("data=4,model=2")

    def lookup(table, ids):
        return annotate.constrain(jnp.take(table, ids, axis=0), "batch", "length", "embed")

    place = lambda *spec: jax.NamedSharding(mesh, P(*spec))  # noqa: E731
    jitted = jax.jit(sl.with_rules(lookup, rules, mesh), in_shardings=(place("model"), place("data")))
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.int32)
    return [collective.kind for collective in parse(jitted.lower(*shapes).compile().as_text()).collectives]


@pytest.mark.newest
def test_col_03_embedding_keeps_the_data_axis():
    assert kinds_of_embedding(RULES) == ["all-reduce"]
    # Negative control: a spec that leaves the data axis out gathers the batch.
    dropped = Rules.parse(["batch -> none", *map(str, RULES.rules[1:])])
    assert "all-gather" in kinds_of_embedding(dropped)
