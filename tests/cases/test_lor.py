"""Field troubles, group LOR: adapters beside a frozen base."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from models import gpt, lora
from shardlib import annotate
from shardlib.audit.donation import check_donations
from shardlib.optimizer_specs import resolve_state
from shardlib.trainable import mask_from, split
from shardlib.tree_paths import leaves_with_paths

PLAN = "fsdp=4,tensor=2"
EMBED, HIDDEN, RANK = 16, 32, 4
ADAM = optax.adam(1e-2, eps=1e-3)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(HIDDEN, use_bias=False, kernel_init=annotate.logical(init, "embed", "mlp"), name="up")(x)
        x = nn.Dense(EMBED, use_bias=False, kernel_init=annotate.logical(init, "mlp", "embed"), name="down")(nn.gelu(x))
        return x


def example():
    module = MLP()

    def loss(params, batch, rng):
        y = module.apply({"params": params}, batch["x"])
        return sl.Loss(total=((y - batch["x"][:, ::-1]) ** 2).sum(), weight=y.size)

    return module, loss, {"x": sl.ArraySpec(shape=(8, EMBED), dtype="float32", axes=("batch", None))}


def adapted():
    return lora.wrap(example(), rank=RANK, alpha=8.0, kernels=("up", "down"))


def bound(parts, mesh=PLAN, **options):
    module, loss, spec = parts
    return sl.bind(module, loss, sl.Plan(mesh=mesh, **options), spec)


def batches(count=3):
    draw = np.random.default_rng(0).normal
    return [{"x": draw(size=(8, EMBED)).astype(np.float32)} for _ in range(count)]


@pytest.mark.newest
def test_lor_01_adapters_leave_the_base_where_it_is():
    base, both = bound(example()), bound(adapted())
    assert set(base.params.entries) <= set(both.params.entries)
    specs = {entry.path: entry.spec for entry in both.params.entries if lora.is_adapter(entry.path, entry.names)}
    assert specs == {
        "up/lora_a": P("fsdp", None),
        "up/lora_b": P(None, "tensor"),
        "down/lora_a": P("tensor", None),
        "down/lora_b": P(None, "fsdp"),
    }
    report = str(both.explain())
    assert all(f"{path} float32[" in report for path in specs)

    placed = drawn(base)
    merged = lora.with_adapters(placed, drawn(both, seed=1))
    assert jax.tree.structure(merged) == jax.tree.structure(both.abstract_params)
    for name in ("up", "down"):
        assert merged[name]["kernel"] is placed[name]["kernel"]  # the same shards in the same buffers
        assert merged[name]["lora_a"].sharding.spec == specs[f"{name}/lora_a"]
    # B starts as zeros, so the adapted model is the base until it is trained.
    started, _ = both.init(jax.random.key(0))
    assert not any(np.any(started[name]["lora_b"]) for name in ("up", "down"))


def drawn(bound, seed=0):
    """Parameters drawn at random, placed as bound says."""
    draw = np.random.default_rng(seed).normal
    params = jax.tree.map(lambda leaf: draw(size=leaf.shape).astype(np.float32), bound.abstract_params)
    return jax.device_put(params, sl.shardings(bound.params.specs, sl.make_mesh(PLAN)))


@pytest.mark.parametrize(
    "options", [{"lowering": "automatic"}, {"lowering": "explicit", "num_microbatches": 2}], ids=str
)
def test_lor_02_state_for_adapters_alone(options):
    trainer = sl.Trainer(bound(adapted(), **options), ADAM, trainable=lora.is_adapter, check_separable=False)
    state = trainer.init(jax.random.key(0))
    before = jax.tree.map(np.asarray, state.params)
    adapters = [leaf for path, leaf in leaves_with_paths(state.params) if "lora" in path]
    moments = [leaf for path, leaf in leaves_with_paths(state.opt_state) if "count" not in path]
    assert sum(leaf.nbytes for leaf in moments) == 2 * sum(leaf.nbytes for leaf in adapters)
    held = lambda leaves: sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)  # noqa: E731
    closed_form = RANK * (EMBED // 4 + HIDDEN // 2 + HIDDEN // 2 + EMBED // 4) * 4
    assert (held(adapters), held(moments)) == (closed_form, 2 * closed_form)
    losses = []
    for batch in batches():
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    check_donations(trainer.compiled)
    for path, leaf in leaves_with_paths(state.params):
        start = dict(leaves_with_paths(before))[path]
        assert (np.asarray(leaf).tobytes() == start.tobytes()) == ("lora" not in path), path
    single, wanted = alone(before)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    for (path, leaf), want in zip(leaves_with_paths(state.params), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(leaf, want, rtol=0, atol=1e-5 * float(np.abs(want).max()), err_msg=path)


def alone(params):
    """The oracle, on one device and by hand: kernels with A B added, Adam on A and B."""

    def loss(adapters, x):
        kernel = lambda n: params[n]["kernel"] + 8.0 / RANK * adapters[n]["lora_a"] @ adapters[n]["lora_b"]  # noqa: E731
        return jnp.mean((nn.gelu(x @ kernel("up")) @ kernel("down") - x[:, ::-1]) ** 2)

    adapters = {n: {k: jnp.asarray(params[n][k]) for k in ("lora_a", "lora_b")} for n in ("up", "down")}
    state, losses = ADAM.init(adapters), []

    @jax.jit
    def step(adapters, state, x):
        value, grads = jax.value_and_grad(loss)(adapters, x)
        updates, state = ADAM.update(grads, state)
        return optax.apply_updates(adapters, updates), state, value

    for batch in batches():
        adapters, state, value = step(adapters, state, batch["x"])
        losses.append(float(value))
    return {n: {"kernel": params[n]["kernel"], **adapters[n]} for n in ("down", "up")}, losses


def test_lor_02_the_checks_see_a_base_that_is_trained_too():
    both = bound(adapted())
    result = resolve_state(ADAM, both.abstract_params, both.params.specs, mesh=PLAN)
    everything = sum(entry.size_bytes for entry in result.entries if entry.shape)
    mask = mask_from(lora.is_adapter, both.params)
    chosen = resolve_state(ADAM, split(both.abstract_params, mask)[0], split(both.params.specs, mask)[0], mesh=PLAN)
    adapters = 2 * RANK * (2 * EMBED + 2 * HIDDEN) * 4
    assert sum(entry.size_bytes for entry in chosen.entries if entry.shape) == adapters
    assert everything == adapters + 2 * 2 * EMBED * HIDDEN * 4


def test_lor_stacked_layers_of_the_example_model():
    sizes = {"layers": 2, "embed": 32, "heads": 4, "mlp": 64, "length": 16}
    both = bound(lora.small(**sizes))
    entries = {entry.path: entry for entry in both.params.entries}
    assert set(bound(gpt.small(**sizes)).params.entries) <= set(both.params.entries)
    query = [entries[f"layers/attention/query/lora_{part}"] for part in "ab"]
    assert [entry.names for entry in query] == [
        ("layers", "embed", "lora_rank"),
        ("layers", "lora_rank", "heads", "head_dim"),
    ]
    assert [entry.spec for entry in query] == [P(None, "fsdp", None), P(None, None, "tensor", None)]
    out = bound(lora.wrap(gpt.small(**sizes), kernels=("out",)))
    assert {e.path: e.shape for e in out.params.entries if "lora_a" in e.path} == {
        "layers/attention/out/lora_a": (2, 4, 8, 4)
    }
    with pytest.raises(TypeError, match="norm is LayerNorm"):
        bound(lora.wrap(gpt.small(**sizes), kernels=("norm",)))
