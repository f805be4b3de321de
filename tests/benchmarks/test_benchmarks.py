"""The benchmarks run, compare equal things and report misses; what they measure is not judged here."""

import io
import json

import pytest
from rich.console import Console

from benchmarks import resolve_scale, step_overhead
from benchmarks.step_overhead import BASE, MAX_RATIO, Measured, missed, ratio, table, to_json
from benchmarks.variants import COMPARISONS, MICRO, Case

MESH = "data=2,tensor=4"
AUTOMATIC = COMPARISONS["automatic"]
OURS = AUTOMATIC.ours


def measured(comparison, names=None):
    """The variants once, tiny."""
    case = Case(config=MICRO, batch=comparison.batch, mesh=MESH, num_microbatches=comparison.num_microbatches)
    variants = {name: make for name, make in comparison.variants.items() if names is None or name in names}
    return step_overhead.measure(case, rounds=1, compile_rounds=1, variants=variants, note=lambda line: None)


@pytest.fixture(scope="module")
def results():
    return {MESH: measured(AUTOMATIC, (BASE, *OURS))}


def losses_agree(found):
    return all(each.losses == pytest.approx(found[BASE].losses, abs=1e-5) for each in found.values())


def test_the_toolkit_computes_the_losses_of_the_hand_written_step(results):
    assert set(results[MESH]) == {BASE, *OURS}
    assert losses_agree(results[MESH])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMPARISONS)
def test_every_variant_computes_the_same_losses(name):
    found = measured(COMPARISONS[name])
    assert set(found) == set(COMPARISONS[name].variants)
    assert losses_agree(found)


def test_the_table_has_a_row_per_variant_and_the_json_parses(results):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(results))
    text = console.export_text()
    assert all(name in text for name in results[MESH])
    document = json.loads(json.dumps(to_json(results, OURS)))
    assert document["meshes"][MESH][BASE]["ratios"]["sent_bytes"] == 1.0
    assert document["meshes"][MESH]["toolkit linen"]["collectives"]["all-reduce"]["sent_bytes"] > 0


def test_variants_that_disagree_are_not_compared(results):
    wrong = Measured(losses=[loss + 1e-3 for loss in results[MESH][BASE].losses])
    with pytest.raises(AssertionError, match="toolkit nnx"):
        step_overhead.check_losses(results[MESH] | {"toolkit nnx": wrong})


@pytest.mark.parametrize("quantity", MAX_RATIO)
def test_a_value_above_its_threshold_is_a_miss(quantity):
    values = {name: [100.0] for name in MAX_RATIO}
    above = values | {quantity: [100.0 * MAX_RATIO[quantity] + 0.1]}
    found = {BASE: Measured(values=values), OURS[0]: Measured(values=values), OURS[1]: Measured(values=above)}
    assert [line.split(": ")[:2] for line in missed({MESH: found}, OURS)] == [[MESH, OURS[1]]]


def test_only_the_toolkit_is_judged():
    values, worse = ({name: [size] for name in MAX_RATIO} for size in (1.0, 9.0))
    assert not missed({MESH: {BASE: Measured(values=values), "flax linen": Measured(values=worse)}}, OURS)


def test_a_ratio_is_the_median_over_rounds():
    found = {BASE: Measured(values={"x": [1.0, 2.0, 1.0]}), "other": Measured(values={"x": [1.0, 3.0, 9.0]})}
    assert ratio(found, "other", "x") == 1.5


def test_resolving_405b_reports_every_part():
    mesh = resolve_scale.MESHES[-1]
    found = resolve_scale.measure([mesh], rounds=1)
    assert set(found[mesh]) == set(resolve_scale.PARTS)
    assert resolve_scale.spread(found) == 1.0


def test_a_slow_mesh_and_a_steep_one_are_misses():
    seconds = dict.fromkeys(resolve_scale.PARTS, 0.1)
    slow = seconds | {"all": resolve_scale.MAX_SECONDS + 0.1}
    assert resolve_scale.missed({"data=8": seconds}) == []
    assert len(resolve_scale.missed({"data=8": seconds, "data=16": slow})) == 2
