"""The hand-written pipelines equal one device and are what they claim to be; the benchmark judges by its limits."""

import functools
import io
import json
from dataclasses import replace

import jax
import pytest
from rich.console import Console

from benchmarks import pipeline, plain_gpt, plain_pipeline
from benchmarks.pipeline import EVERY, FORMS, LIMITS, MESHES, OURS, SKIP, Measured, Point, case_at
from meshes.build import make_mesh
from shardlib.audit.hlo import parse
from tests.oracle import assert_losses_equal, assert_trees_equal

MICROBATCHES = 4


def small_case(mesh):
    return case_at(mesh, MICROBATCHES, quick=True)


@functools.cache
def one_device(case):
    at = plain_gpt.Layout(mesh=make_mesh("data=1", devices="cpu"), batch="data", fsdp=None, tensor=None)
    loss = functools.partial(plain_gpt.loss, config=case.config, at=at)
    return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(case.weights(), case.tokens()))


@functools.cache
def compiled_gradients(case, form):
    mesh = case.make_mesh()
    params = jax.device_put(case.weights(), plain_gpt.named(plain_pipeline.param_specs(mesh), mesh))
    function = functools.partial(plain_pipeline.gradients, mesh=mesh, form=form, num_microbatches=case.num_microbatches)
    return jax.jit(function).lower(params, case.tokens()).compile(), params


def assert_equals_one_device(case, form):
    compiled, params = compiled_gradients(case, form)
    grads, metrics = jax.device_get(compiled(params, case.tokens()))
    wanted_grads, wanted = one_device(case)
    assert_losses_equal(metrics["loss"], wanted["loss"])
    assert metrics["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert_trees_equal(grads, wanted_grads, "gradient")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_equal_one_device(form, mesh):
    assert_equals_one_device(small_case(mesh), FORMS[form])


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_equal_one_device_on_all_three_axes(form):
    assert_equals_one_device(small_case("stage=2,data=2,tensor=2"), FORMS[form])


def test_a_sum_that_forgets_the_data_shards_is_seen(monkeypatch):
    monkeypatch.setattr(plain_pipeline.Region, "shards", 1)
    same = replace(FORMS[SKIP], manual=tuple(reversed(FORMS[SKIP].manual)))  # not the program compiled before
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equals_one_device(small_case(MESHES[0]), same)


def reductions(case, form):
    program = parse(compiled_gradients(case, FORMS[form])[0].as_text())
    return [each for each in program.of_kind("all-reduce") if each.bytes_per_device > 100]


def test_only_the_manual_data_axis_reduces_gradients_outside_the_ticks():
    case = small_case(MESHES[0])
    assert {each.loop_depth for each in reductions(case, SKIP)} == {0}
    assert any(each.loop_depth for each in reductions(case, EVERY))


def test_only_the_skipping_form_puts_its_layers_under_conditions():
    case = small_case(MESHES[1])  # where every layer reduces over tensor
    assert all(each.in_branch for each in reductions(case, SKIP) if each.loop_depth == 2)
    assert not any(each.in_branch for each in reductions(case, EVERY) if each.loop_depth == 2)
    assert any(each.loop_depth == 2 for each in reductions(case, EVERY))


def test_one_permute_each_way():
    case = small_case(MESHES[0])
    for form in FORMS.values():
        assert len(parse(compiled_gradients(case, form)[0].as_text()).of_kind("collective-permute")) == 2


def run(*argv, tmp_path):
    path = tmp_path / "found.json"
    common = ("--quick", "--repeat", "1", "--compile-repeat", "1", "--microbatches", "4", "--json", str(path))
    status = pipeline.main([*argv, *common])
    return status, json.loads(path.read_text())


@pytest.mark.exhaustive
def test_the_hand_written_pipelines_are_measured_alone(tmp_path, capsys):
    status, document = run("--only", "plain", "--mesh", MESHES[0], tmp_path=tmp_path)
    assert status == 0
    (point,) = document["points"]
    assert (point["mesh"], point["microbatches"], set(point["programs"])) == (MESHES[0], 4, set(FORMS))
    for each in point["programs"].values():
        assert set(each["values"]) == set(pipeline.COLUMNS)
        assert each["values"]["permutes"] == [2]
        assert each["values"]["permutes_run"] == [2 * (4 + 3)]
    every, skip = (point["programs"][name]["values"]["gradient_bytes"][0] for name in FORMS)
    assert every > skip > 0
    shown = capsys.readouterr().out
    assert EVERY in shown and SKIP in shown and OURS not in shown


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
def test_the_toolkit_computes_the_losses_of_the_hand_written_pipelines(mesh, tmp_path, capsys):
    status, document = run("--mesh", mesh, tmp_path=tmp_path)
    assert status == 0
    assert set(document["points"][0]["programs"]) == {*FORMS, OURS}
    assert "limits of the toolkit" in capsys.readouterr().out


def test_programs_that_disagree_are_not_compared():
    found = {SKIP: Measured(losses=[4.0, 3.9]), OURS: Measured(losses=[4.0, 3.91])}
    with pytest.raises(AssertionError, match=OURS):
        pipeline.check_losses(found)


def results(microbatches, **ours):
    """Hand-written values of 100; ours at the named ratios, otherwise far below."""
    base = Measured(values={name: [100.0, 150.0] for name in pipeline.COLUMNS})
    mine = Measured(values={name: [100.0 * ours.get(name, 0.1)] for name in pipeline.COLUMNS})
    return {Point(mesh=MESHES[0], microbatches=microbatches): {EVERY: base, SKIP: base, OURS: mine}}


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_value_above_its_limit_is_a_miss(limit):
    microbatches = limit.microbatches or 16
    at_limit = results(microbatches, **{limit.quantity: limit.most})
    above = results(microbatches, **{limit.quantity: limit.most + 0.001})
    assert not any(repr(limit.against) in line for line in pipeline.missed(at_limit, residuals="full"))
    assert any(
        f"{limit.quantity} is" in line and repr(limit.against) in line
        for line in pipeline.missed(above, residuals="full")
    )


def test_limits_hold_only_where_they_are_stated():
    above = results(32, temp_bytes=1.5)
    assert len(pipeline.missed(above, residuals="full")) == 2
    assert not pipeline.missed(above, residuals="none")
    assert not pipeline.missed(results(16, temp_bytes=1.5), residuals="full")
    assert not pipeline.missed(results(16, step_cpu_seconds=1.02), residuals="full")


def test_the_tables_show_ratios_and_verdicts():
    found = results(8, step_cpu_seconds=0.8)
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(pipeline.table(found))
    console.print(pipeline.limits_table(found, residuals="full"))
    text = console.export_text()
    assert "80.00 (0.800, 0.800)" in text
    assert "missed" in text and "0.78" in text and "met" in text
