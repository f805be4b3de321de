"""What survives a cut: the parts, run in turn, give the loss and its gradients. Parts alone, on one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models import gpt, gpt_nnx, llama
from shardlib.annotate import layer_boundary
from shardlib.objective import sums_of
from shardlib.pipeline.cutting import cut
from tests import oracle
from tests.shardlib.pipeline_execution import reference
from tests.shardlib.pipeline_execution.in_turn import check, in_turn

LAYERS, WIDTH, ROWS, VOCAB = 3, 8, 4, 16
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, 6)).astype(np.int32)
X = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


def weights(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.4)


def stacked(**more):
    return {"w": weights(LAYERS, WIDTH, WIDTH), "head": weights(WIDTH, VOCAB, seed=1), **more}


def dense(x, w):
    return jnp.tanh(x @ w)


def scanned(params, x, layer=dense):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])[0]


# Loops of every kind ---------------------------------------------------------------------------------------------


@pytest.mark.newest
def test_a_scan_written_by_hand():
    parts = check(lambda params, x: (scanned(params, x) @ params["head"]).mean(), stacked(), X, num_layers=LAYERS)
    assert [(kind.leaves, kind.dim) for kind in parts.stacked] == [((1,), 0)]
    assert parts.outer == (0,)
    assert [leaf.shape for leaf in parts.message] == [X.shape]
    assert "a scan of 3 steps over w" in parts.where
    assert "test_cut.py" in parts.where


def test_a_jitted_loss_and_jitted_layers():
    layer = jax.jit(dense)
    check(jax.jit(lambda params, x: scanned(params, x, layer).mean()), stacked(), X, num_layers=LAYERS)


@pytest.mark.parametrize("where", ["inside", "around", "both"])
def test_checkpoints_inside_the_scan_and_around_it(where):
    inside = jax.checkpoint(dense) if where != "around" else dense
    stack = lambda params, x: scanned(params, x, inside)  # noqa: E731
    stack = jax.checkpoint(stack) if where != "inside" else stack
    check(lambda params, x: (stack(params, x) @ params["head"]).mean(), stacked(), X, num_layers=LAYERS)


MODELS = {
    "gpt with remat": lambda: gpt.small(
        batch=2, layers=3, embed=16, heads=4, mlp=32, vocab=16, length=6, dropout=0.2, tied=True, remat=True
    ),
    "gpt_nnx": lambda: gpt_nnx.small(batch=2, layers=3, embed=16, heads=4, mlp=32, vocab=16, length=6, dropout=0.2),
    "llama": lambda: llama.tiny(batch=2, layers=3, embed=16, heads=4, kv_heads=2, mlp=32, vocab=16, length=6),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models(name):
    example = MODELS[name]()
    params, key = reference.start(example)
    tokens = example[2]["inputs"]
    batch = oracle.token_batch(0, batch=2, length=tokens.shape[1], vocab=16)
    loss = lambda params, piece: sums_of(example[1], params, *piece, state=None)  # noqa: E731
    # Their gradients are compared where they are trained.
    parts = check(loss, params, (batch, key), num_layers=3, gradients=False)
    assert len(parts.carry) == 1, "masks, positions and keys do not travel"


class ScannedNNX(nnx.Module):
    """Layers under `nnx.vmap` and `nnx.scan`, dropout included."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def layers(rngs):
            return Linear(rngs)

        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = layers(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return layer(x)

        return run(self.layers, self.embed(tokens))


class Linear(nnx.Module):
    """A residual layer with dropout of its own stream."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


def nnx_loss(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, tokens: (nnx.merge(graphdef, params, rest, copy=True)(tokens) ** 2).mean(), params


@pytest.mark.newest
def test_nnx_scan():
    loss, params = nnx_loss(ScannedNNX(nnx.Rngs(params=0, dropout=1)))
    parts = check(loss, params, TOKENS, num_layers=LAYERS)
    assert [leaf.dtype for leaf in parts.message] == [np.float32], "counters of random streams stay behind"


# Layers between markers ------------------------------------------------------------------------------------------


class Marked(nn.Module):
    """Linen layers in a Python loop: dropout, a mask for all, an auxiliary loss of each."""

    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        x, aux = layer_boundary(embed(tokens)), []
        mask = (tokens > 3)[..., None].astype(x.dtype)
        for _ in range(LAYERS):
            x, extra = (nn.remat(MarkedLayer) if self.remat else MarkedLayer)()(x, mask)
            x = layer_boundary(x)
            aux.append(extra)
        return embed.attend(x), sum(aux)


class MarkedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        hidden = nn.gelu(nn.Dense(WIDTH)(nn.LayerNorm()(x)))
        hidden = nn.Dropout(0.2, deterministic=False)(hidden)
        return x + hidden * mask, (hidden**2).mean()


@pytest.mark.newest
@pytest.mark.parametrize("remat", [False, True])
def test_markers_between_linen_layers(remat):
    model = Marked(remat)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, TOKENS)

    def loss(params, piece):
        logits, aux = model.apply(params, piece[0], rngs={"dropout": piece[1]})
        return -jax.nn.log_softmax(logits)[..., 0].mean() + 0.1 * aux, aux

    parts = check(jax.jit(loss) if remat else loss, params, (TOKENS, jax.random.key(2)), num_layers=LAYERS)
    assert {kind.dim for kind in parts.stacked} == {None}
    assert {len(kind.leaves) for kind in parts.stacked} == {LAYERS}
    assert [leaf.shape for leaf in parts.outputs] == [(LAYERS,)]
    assert "3 layers between markers" in parts.where


class MarkedNNX(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = layer_boundary(self.embed(tokens))
        for layer in self.layers:
            x = layer_boundary(x + self.dropout(jnp.tanh(layer(x))))
        return self.head(x)


def test_markers_between_nnx_layers():
    loss, params = nnx_loss(MarkedNNX(nnx.Rngs(params=0, dropout=1)))
    check(loss, params, TOKENS, num_layers=LAYERS)


def test_markers_around_a_parameter_that_all_layers_share():
    params = {"shared": weights(WIDTH, WIDTH), "own": [weights(WIDTH, seed=k) for k in range(LAYERS)]}

    def loss(params, x):
        x = layer_boundary(x)
        for own in params["own"]:
            x = layer_boundary(jnp.tanh(x @ params["shared"]) + own[None])
        return (x**2).mean()

    parts = check(loss, params, X, num_layers=LAYERS)
    assert len(parts.outer) == 1


def test_markers_on_several_arrays():
    params = [weights(WIDTH, WIDTH, seed=k) for k in range(LAYERS)]

    def loss(params, x):
        x, total = layer_boundary((x, jnp.zeros(())))
        for w in params:
            x = dense(x, w)
            x, total = layer_boundary((x, total + (x**2).mean()))
        return (x**2).mean() + total

    check(loss, params, X, num_layers=LAYERS)


# What travels, what stays ----------------------------------------------------------------------------------------


def test_a_carry_of_several_arrays():
    def layer(carry, w):
        x, state = carry["x"], carry["state"]
        x = dense(x, w)
        return {"x": x, "state": state * 0.5 + x.mean(-1)}, None

    def loss(params, x):
        carry, _ = jax.lax.scan(layer, {"x": x, "state": jnp.zeros(ROWS)}, params["w"])
        return (carry["x"] @ params["head"]).mean() + carry["state"].sum()

    assert len(check(loss, stacked(), X, num_layers=LAYERS).carry) == 2


def test_a_carry_that_never_changes_does_not_travel():
    def layer(carry, w):
        x, mask = carry
        return (dense(x, w) * mask, mask), None

    def loss(params, x):
        (x, mask), _ = jax.lax.scan(layer, (x, (x > 0).astype(x.dtype)), params["w"])
        return (x @ params["head"]).mean() + mask.mean()

    assert len(check(loss, stacked(), X, num_layers=LAYERS).carry) == 1


def test_a_product_that_all_layers_read_travels_with_the_carry():
    """A stage would otherwise compute it again."""

    def loss(params, x):
        context = x @ params["cross"]
        x = jax.lax.scan(lambda x, w: (dense(x + context, w), None), x, params["w"])[0]
        return x.mean()

    parts = check(loss, stacked(cross=weights(WIDTH, WIDTH, seed=5)), X, num_layers=LAYERS)
    assert len(parts.carry) == 2
    assert parts.flops[3] == 0


def test_outputs_of_every_layer():
    def layer(x, w):
        x = dense(x, w)
        return x, {"norm": (x**2).mean(), "unused": x.sum(-1)}

    def loss(params, x):
        x, made = jax.lax.scan(layer, x, params["w"])
        return (x @ params["head"]).mean() + (made["norm"] * jnp.arange(1.0, LAYERS + 1)).sum()

    parts = check(loss, stacked(), X, num_layers=LAYERS)
    assert [leaf.shape for leaf in parts.outputs] == [(LAYERS,)], "what nobody reads does not travel"


@pytest.mark.parametrize("change", [lambda w: w.astype(jnp.bfloat16), lambda w: 0.5 * w, lambda w: jnp.exp(w * w)])
def test_elementwise_changes_of_stacked_parameters(change):
    def loss(params, x):
        x = jax.lax.scan(lambda x, w: (dense(x, w.astype(x.dtype)), None), x, change(params["w"]))[0]
        return x.mean()

    params = stacked()
    if change(params["w"]).dtype == params["w"].dtype:
        check(loss, params, X, num_layers=LAYERS)
        return
    # A cast per layer or of all layers rounds alike; compared bit by bit.
    assert float(in_turn(cut(loss, params, X), params, X)[0]) == float(loss(params, X))


def test_two_parameters_in_one_slice():
    def loss(params, x):
        return jax.lax.scan(lambda x, w: (dense(x, w), None), x, params["w"] * params["gate"])[0].mean()

    parts = check(loss, stacked(gate=weights(LAYERS, WIDTH, WIDTH, seed=7)), X, num_layers=LAYERS)
    assert len(parts.stacked) == 2


def test_layers_stacked_along_another_dim():
    def loss(params, x):
        x = jax.lax.scan(lambda x, w: (dense(x, w), None), x, jnp.moveaxis(params["w"], 1, 0))[0]
        return x.mean()

    parts = check(loss, {"w": weights(WIDTH, LAYERS, WIDTH)}, X, num_layers=LAYERS)
    assert parts.stacked[0].dim == 1


def test_linen_layers_stacked_along_another_dim():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(WIDTH)(x)), None

    stack = nn.scan(Layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=LAYERS)()
    params = stack.init(jax.random.key(0), X, None)
    parts = check(lambda params, x: stack.apply(params, x, None)[0].mean(), params, X, num_layers=LAYERS)
    assert [kind.dim for kind in parts.stacked] == [1, 1]


def test_masks_positions_rotary_tables_and_segments_are_side_inputs():
    def rotate(x, table):
        cos, sin = table
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def loss(params, piece):
        tokens, segments = piece
        positions = jnp.arange(tokens.shape[1], dtype=jnp.float32)
        angles = positions[None, :, None] * (100.0 ** -jnp.linspace(0, 1, WIDTH // 2))[None, None]
        table = (jnp.cos(angles), jnp.sin(angles))
        mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(tokens.shape[1], dtype=bool)[None]

        def layer(x, w):
            turned = rotate(x @ w, table)
            scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", turned, turned), -1e9)
            return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x), None

        x = jax.lax.scan(layer, params["embed"][tokens], params["w"])[0]
        return (x**2).mean()

    segments = np.repeat(np.int32([[0, 0, 0, 1, 1, 1]]), ROWS, 0)
    params = {"embed": weights(VOCAB, WIDTH, seed=3), "w": weights(LAYERS, WIDTH, WIDTH)}
    assert len(check(loss, params, (TOKENS, segments), num_layers=LAYERS).carry) == 1


def test_inputs_with_a_slice_per_layer():
    """Scales that depend on depth, and keys."""

    def loss(params, piece):
        x, key = piece
        depth = jnp.arange(1.0, LAYERS + 1)

        def layer(x, own):
            w, scale, key = own
            return x + scale * dense(x, w) * jax.random.bernoulli(key, 0.7, x.shape), None

        return jax.lax.scan(layer, x, (params["w"], 1 / depth, jax.random.split(key, LAYERS)))[0].mean()

    check(loss, stacked(), (X, jax.random.key(0)), num_layers=LAYERS)


def test_collections_that_the_loss_only_reads():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            scale = self.variable("constants", "scale", lambda: jnp.full((), 0.5))
            return jnp.tanh(nn.Dense(WIDTH)(x)) * scale.value, None

    options = {"variable_axes": {"params": 0, "constants": 0}, "split_rngs": {"params": True}}
    stack = nn.scan(Scaled, **options, length=LAYERS)()
    variables = stack.init(jax.random.key(0), X, None)
    constants = {"constants": variables["constants"]}
    loss = lambda params, x: stack.apply({"params": params, **constants}, x, None)[0].mean()  # noqa: E731
    check(loss, variables["params"], X, num_layers=LAYERS)


@pytest.mark.parametrize(
    "name", ["softmax_cross_entropy_with_integer_labels", "softmax_cross_entropy", "sigmoid_binary_cross_entropy"]
)
def test_losses_of_optax(name):
    labels = np.arange(ROWS) % VOCAB
    labels = labels if "integer" in name else np.eye(VOCAB, dtype=np.float32)[labels]

    def loss(params, piece):
        logits = scanned(params, piece[0]) @ params["head"]
        return getattr(optax.losses, name)(logits, piece[1]).mean()

    check(loss, stacked(), (X, labels), num_layers=LAYERS)


def test_a_loop_in_every_layer_and_a_loop_beside_them():
    """A scan over time inside a layer, and one without parameters before: neither is a stack."""

    def layer(x, w):
        steps = jax.lax.scan(lambda h, row: (jnp.tanh(h + row), None), x, jnp.stack([x, x @ w]))[0]
        return steps, None

    def loss(params, x):
        x = jax.lax.scan(lambda total, row: (total + row[None], None), x, x)[0]
        return jax.lax.scan(layer, x, params["w"])[0].mean()

    check(loss, stacked(), X, num_layers=LAYERS)


def test_a_value_that_the_layers_neither_read_nor_make():
    def loss(params, x):
        skip = x @ params["skip"]
        return (scanned(params, x) + skip).mean()

    check(loss, stacked(skip=weights(WIDTH, WIDTH, seed=4)), X, num_layers=LAYERS)
