"""Cross entropy over a split vocabulary: the losses, hits and gradients of whole logits on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshes import ShardingError, make_mesh
from shardlib.ops import vocab_loss
from shardlib.ops.vocab_loss import TokenLosses, token_losses
from shardlib.ops.vocab_shards import Shards
from tests.covering import name, pairwise, product
from tests.oracle import assert_losses_equal, assert_trees_equal
from tests.vocabularies import (
    BATCH,
    LENGTH,
    PLACES,
    STORED,
    arrays,
    one_device,
    per_token,
    split,
    under_a_stage,
    with_gradients,
)

OBJECTIVES = {
    "plain": {},
    "smoothed": {"smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "both": {"smoothing": 0.1, "z_loss": 0.01},
}
FACTORS = {
    "place": list(PLACES),
    "tensor": [1, 2, 4, 8],
    "tied": [False, True],
    "vocab": [STORED, 19],  # 19: one shard of eight has padding alone, another has some
    "objective": list(OBJECTIVES),
    "num_chunks": [2, 3, 100],  # of a length of 10
}


def valid(case):
    return case["tensor"] <= 4 or case["place"] != "nested"


def check(*, place, tensor, tied, vocab, objective, num_chunks):
    *given, weights = arrays(vocab=vocab, tied=tied)
    given.append(jnp.ones_like(weights) if objective == "plain" else weights)
    options = {"vocab": vocab, "vocab_dim": 0 if tied else 1, **OBJECTIVES[objective]}
    found = jax.jit(split(place, tensor, num_chunks=num_chunks, **options))(*given)
    wanted = one_device(*given, **options)
    assert_losses_equal(found[0], wanted[0])
    assert_trees_equal(found[1:], wanted[1:], place)
    padding = np.asarray(found[4] if tied else found[4].T)[vocab:]
    assert (padding == 0).all()


@pytest.mark.newest
@pytest.mark.parametrize("case", pairwise(FACTORS, valid=valid), ids=name)
def test_equal_to_whole_logits_on_one_device(case):
    with jax.numpy_dtype_promotion("strict"):
        check(**case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", product(FACTORS, valid=valid), ids=name)
def test_equal_to_whole_logits_in_every_combination(case):
    check(**case)


def test_a_vocabulary_spread_over_stages_too():
    options = {"vocab": 19, "vocab_dim": 1, **OBJECTIVES["both"]}
    given = arrays(vocab=19)
    mesh = make_mesh("stage=2,data=2,tensor=2")
    held = P(None, "stage")
    # Manual over stage, whose slice of the head is at hand; automatic over tensor and data.
    losses = functools.partial(token_losses, axes=("stage", "tensor"), **options)
    spread = jax.shard_map(
        functools.partial(with_gradients, losses),
        mesh=mesh,
        axis_names={"stage"},
        in_specs=(P(), held, P(), P()),
        out_specs=(P(), P(), P(), P(), held),
        check_vma=False,
    )
    wanted = one_device(*given, **options)
    assert_trees_equal(jax.jit(spread)(*given), wanted, "stage manual, tensor automatic")
    whole = functools.partial(losses, mesh=mesh)
    assert_trees_equal(jax.jit(functools.partial(with_gradients, whole))(*given), wanted, "both automatic")
    # Negative control: the order of the axes is the order in which the vocabulary was split.
    with pytest.raises(ShardingError, match="manual over a later one, whose slices would interleave"):
        swapped = functools.partial(token_losses, axes=("tensor", "stage"), **options)
        region = lambda *given: with_gradients(swapped, *given)[0]  # noqa: E731
        in_specs = (P(), held, P(), P())
        region = jax.shard_map(
            region, mesh=mesh, axis_names={"stage"}, in_specs=in_specs, out_specs=P(), check_vma=False
        )
        jax.jit(region)(*given)


def test_a_loss_traced_ahead_fits_the_region_whose_axes_it_was_traced_under():
    mesh = make_mesh("stage=2,data=2,tensor=2")
    given = arrays(vocab=19)
    function = functools.partial(with_gradients, functools.partial(token_losses, vocab=19))
    inside = mesh.abstract_mesh.update_axis_types({"stage": AxisType.Manual})
    with jax.sharding.use_abstract_mesh(inside):
        traced = jax.make_jaxpr(function)(*given)
    region = under_a_stage(lambda *given: tuple(jaxpr_as_fun(traced)(*given)), mesh)
    assert_trees_equal(jax.jit(region)(*given), one_device(*given, vocab=19, vocab_dim=1), "traced ahead")


def test_length_split_over_context_beside_tensor_and_data():
    mesh = make_mesh("data=2,tensor=2,context=2")
    options = {"vocab": 19, "vocab_dim": 1}
    found = jax.jit(functools.partial(with_gradients, functools.partial(token_losses, mesh=mesh, **options)))
    given = arrays(vocab=19)
    assert_trees_equal(found(*given), one_device(*given, **options), "context")


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_bfloat16_operands_have_float32_statistics(tensor, logits_dtype):
    given = arrays(vocab=19, dtype=jnp.bfloat16)
    losses = functools.partial(token_losses, vocab=19, logits_dtype=logits_dtype, mesh=make_mesh(f"tensor={tensor}"))
    found = jax.jit(functools.partial(with_gradients, losses))(*given)
    x, head, targets, weights = (np.asarray(array.astype(jnp.float32)) for array in given)
    wanted = one_device(x, head, targets, weights, vocab=19, vocab_dim=1)
    if logits_dtype == "bfloat16":
        rounded = jnp.asarray((x @ head)[..., :19]).astype(jnp.bfloat16).astype(jnp.float32)
        loss, nll, hits, _ = per_token(np.asarray(rounded, np.float64), targets)
        wanted = ((loss * weights).sum(), nll, hits, *wanted[3:])
    assert_losses_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[2], wanted[2])
    for gradient, exact in zip(found[3:], wanted[3:], strict=True):
        np.testing.assert_allclose(gradient, exact, atol=np.abs(exact).max() * 2**-6)


def largest_array(num_chunks):
    """Elements of the largest array in the compiled program of one of four shards; logits would be 10 x 24 / 4."""
    mesh = make_mesh("tensor=4")
    losses = functools.partial(token_losses, mesh=mesh, num_chunks=num_chunks)
    given = (jnp.zeros((64, LENGTH, 2)), jnp.zeros((2, STORED)), jnp.zeros((64, LENGTH), int), jnp.ones((64, LENGTH)))
    text = jax.jit(functools.partial(with_gradients, losses)).lower(*given).compile().as_text()
    shapes = re.findall(r"\w\d+\[([\d,]+)\]", text)
    assert shapes
    return max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes)


def test_the_logits_never_exist_whole(optimized):
    assert largest_array(num_chunks=5) < 64 * LENGTH * STORED // 4
    # Negative control: in one chunk they do.
    assert largest_array(num_chunks=1) == 64 * LENGTH * STORED // 4


@pytest.mark.parametrize("mesh", [None, "tensor=4"])
def test_ignored_targets_count_nowhere_and_wrong_ones_are_seen(mesh):
    x, head, targets, _ = arrays(vocab=19)
    targets = targets.at[3, 0].set(19).at[3, 1].set(1000)  # 19 is a stored word, but padding
    mesh = mesh and make_mesh(mesh)
    found = jax.jit(functools.partial(token_losses, vocab=19, mesh=mesh, smoothing=0.1))(x, head, targets)
    ignored, wrong = np.asarray(targets) < 0, np.asarray(targets) >= 19
    for values in found:
        assert (np.asarray(values)[ignored] == 0).all()
    assert np.isnan(np.asarray(found.loss)[wrong]).all() and np.isnan(np.asarray(found.nll)[wrong]).all()
    assert np.isfinite(np.asarray(found.loss)[~wrong]).all()
    assert (np.asarray(found.hits)[wrong] == 0).all()
    assert (np.asarray(found.counted) == ~ignored).all()
    sums = lambda x: jnp.where(wrong, 0.0, token_losses(x, head, targets, vocab=19, mesh=mesh).loss).sum()  # noqa: E731
    gradient = np.asarray(jax.jit(jax.grad(sums))(x))
    assert (gradient[ignored | wrong] == 0).all() and (gradient[~(ignored | wrong)] != 0).all()


def test_logits_far_from_zero_lose_nothing():
    x, head, targets, weights = arrays(vocab=STORED)
    head = jnp.concatenate([jnp.round(head * 4), jnp.full((1, STORED), 3e4)])
    x = jnp.concatenate([jnp.round(x * 4), jnp.ones((BATCH, LENGTH, 1))], axis=-1)
    found = jax.jit(functools.partial(token_losses, mesh=make_mesh("tensor=4")))(x, head, targets)
    wanted = one_device(x, head, targets, weights, vocab=STORED, vocab_dim=1)
    np.testing.assert_allclose(found.nll, wanted[1], rtol=1e-5, atol=1e-6)


def test_negative_control_a_denominator_that_is_not_summed_over_shards(monkeypatch):
    case = {"place": "automatic", "tensor": 4, "tied": False, "vocab": 19, "objective": "both", "num_chunks": 3}
    check(**case)
    total = Shards.total
    monkeypatch.setattr(Shards, "total", lambda self, x: total(self, x).at[0].set(x[0]))
    with pytest.raises(AssertionError):
        check(**case)


def test_negative_control_padding_in_the_denominator(monkeypatch):
    case = {"place": "automatic", "tensor": 4, "tied": True, "vocab": 19, "objective": "both", "num_chunks": 3}
    check(**case)
    monkeypatch.setattr(vocab_loss._HeadLoss, "is_word", lambda self, num_local: jnp.ones((1, 1, num_local), bool))
    with pytest.raises(AssertionError):
        check(**case)


def test_gradients_across_an_unchecked_boundary_are_divided_as_documented():
    given = arrays(vocab=STORED)
    specs = (P(), P(None, "tensor"), P())
    mesh = make_mesh("tensor=4")
    wanted = one_device(*given, vocab=STORED, vocab_dim=1)
    for checked in (True, False):
        losses = jax.shard_map(token_losses, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)
        dhead = jax.jit(functools.partial(with_gradients, losses))(*given)[4]
        np.testing.assert_allclose(dhead, wanted[4] / (1 if checked else 4), atol=1e-5)


def test_inside_a_checked_region_the_result_is_the_same_on_every_shard():
    given = arrays(vocab=STORED)
    region = jax.shard_map(
        functools.partial(with_gradients, token_losses),
        mesh=make_mesh("tensor=4"),
        in_specs=(P(), P(None, "tensor"), P(), P()),
        out_specs=(P(), P(), P(), P(), P(None, "tensor")),  # refused where the types say that values may differ
    )
    assert_trees_equal(jax.jit(region)(*given), one_device(*given, vocab=STORED, vocab_dim=1), "checked")


def test_without_a_mesh_and_with_one_device_the_program_is_the_same():
    given = arrays(vocab=19)
    losses = functools.partial(token_losses, vocab=19)
    alone = jax.jit(losses).lower(*given[:3]).as_text()
    assert jax.jit(functools.partial(losses, mesh=make_mesh("tensor=1"))).lower(*given[:3]).as_text() == alone
    assert isinstance(jax.eval_shape(losses, *given[:3]), TokenLosses)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_dim": 0}, r"head \[8, 24\] is not \[vocab, embed\] for embed=8; fix: pass vocab_dim=1"),
        ({"vocab_dim": 2}, r"vocab_dim=2 is not 0 \(\[vocab, embed\]\) or 1 \(\[embed, vocab\]\)"),
        ({"smoothing": 1.0}, r"smoothing=1.0 is not in \[0, 1\)"),
        ({"num_chunks": 0}, "num_chunks=0 is not 1 or more"),
        ({"targets": jnp.zeros((BATCH, LENGTH))}, r"targets float32\[4, 10\] are not .* integer \[batch, length\]"),
        ({"vocab": 25}, "vocab=25 is not in 1 to 24, the rows that head stores"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    x, head, targets, _ = arrays(vocab=STORED)
    targets = change.pop("targets", targets)
    with pytest.raises(ShardingError, match=message):
        token_losses(x, head, targets, **change)
