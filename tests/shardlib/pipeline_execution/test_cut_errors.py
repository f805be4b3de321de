"""Losses that cannot be cut: each error says what was found, where, and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes import ShardingError
from shardlib.annotate import layer_boundary
from shardlib.pipeline.cutting import cut

L, WIDTH, ROWS = 3, 8, 4
MATRICES = jax.ShapeDtypeStruct((L, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def dense(x, w):
    return jnp.tanh(x @ w)


def scan(x, matrices, **options):
    return jax.lax.scan(lambda x, w: (dense(x, w), None), x, matrices, **options)[0]


def text_of(loss, params, piece=X, **options):
    """The error of a cut: one that a stranger can act on has a fix, and a line of this file where there is one."""
    with pytest.raises(ShardingError) as caught:
        cut(loss, params, piece, **options)
    assert "fix:" in str(caught.value)
    return str(caught.value)


def test_an_encoder_and_a_decoder():
    params = {"decoder": MATRICES, "encoder": MATRICES}

    def loss(params, x):
        return scan(scan(x, params["encoder"]), params["decoder"]).mean()

    text = text_of(loss, params)
    assert "the loss has 2 stacks of layers, and a pipeline stages one" in text
    assert "- a scan of 3 steps over encoder (" in text
    assert "- a scan of 3 steps over decoder (" in text
    assert "test_cut_errors.py" in text
    assert "layer_boundary" in text
    # Of two, the one whose parameters carry the logical axis "layers" is meant.
    assert cut(loss, params, X, layer_leaves=[0]).stacked[0].leaves == (0,)
    assert "2 stacks" in text_of(loss, params, layer_leaves=[0, 1])


def test_no_layers():
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * L

    def unrolled(params, x):
        for w in params:
            x = dense(x, w)
        return x.mean()

    text = text_of(unrolled, params)
    assert "the loss has no layers to stage" in text
    assert "no loop at all: layers written one after another need markers" in text
    assert "x = layer_boundary(x) before the first layer and after every layer" in text

    def over_time(params, x):
        return jax.lax.scan(lambda h, row: (h + jnp.tanh(row @ params[0]), None), x[0], x)[0].mean()

    assert "- a scan of 4 steps (" in text_of(over_time, params)


def test_layers_in_reverse():
    text = text_of(lambda params, x: scan(x, params["w"], reverse=True).mean(), {"w": MATRICES})
    assert "the layers run in reverse: a scan of 3 steps over w" in text
    assert "scan forwards over parameters stacked in the order in which they run" in text


def test_a_parameter_of_the_layers_that_the_loss_reads_too():
    text = text_of(lambda params, x: scan(x, params["w"]).mean() + (params["w"] ** 2).sum(), {"w": MATRICES})
    assert "w belongs to the layers (a scan of 3 steps over w" in text
    assert "and is also read outside of them (" in text
    assert "a penalty per layer can be an output of the scan" in text


def test_slices_made_by_more_than_a_cast():
    text = text_of(lambda params, x: scan(x, jnp.flip(params["w"], 0)).mean(), {"w": MATRICES})
    assert "the layers slice a value made from the parameters w by more than a cast" in text
    text = text_of(lambda params, x: scan(x, params["w"] @ params["w"]).mean(), {"w": MATRICES})
    assert "do the rest inside the layer" in text


def marked(layers, x):
    x = layer_boundary(x)
    for layer in layers:
        x = layer_boundary(layer(x))
    return x.mean()


def matrices(*widths):
    return [jax.ShapeDtypeStruct((WIDTH, width), jnp.float32) for width in widths]


def test_one_marker():
    text = text_of(lambda params, x: dense(layer_boundary(x), params[0]).mean(), matrices(WIDTH))
    assert "there is one layer_boundary (" in text
    assert "layers lie between two" in text


def test_layers_of_other_operations():
    def loss(params, x):
        return marked([lambda x: dense(x, params[0]), lambda x: jax.nn.relu(x @ params[1])], x)

    text = text_of(loss, matrices(WIDTH, WIDTH))
    assert "layer 1 is not the program of layer 0" in text
    assert "layer 0 has tanh" in text
    assert "leave the odd ones before the first or after the last marker" in text


def test_layers_of_other_sizes():
    def loss(params, x):
        return marked([lambda x: dense(x, params[0]) @ params[0].T, lambda x: dense(x, params[1]) @ params[1].T], x)

    text = text_of(loss, matrices(WIDTH, 2 * WIDTH))
    assert "layer 1 is not the program of layer 0" in text
    assert "float32[8,8]" in text
    assert "float32[8,16]" in text


def test_a_layer_with_more_operations():
    def loss(params, x):
        return marked([lambda x: dense(x, params[0]), lambda x: dense(x, params[1]) + 1.0], x)

    text = text_of(loss, matrices(WIDTH, WIDTH))
    assert "layer 0 ends with float32[4,8] and layer 1 has add(float32[4,8], float32[])" in text


def test_markers_on_other_kinds_of_values():
    def loss(params, x):
        x = dense(layer_boundary(x), params[0])
        return layer_boundary(layer_boundary(x.astype(jnp.bfloat16)) @ params[1]).mean()

    text = text_of(loss, matrices(WIDTH, WIDTH))
    assert "layer_boundary 1 marks bfloat16[4,8]" in text
    assert "the first one float32[4,8]" in text


def test_a_value_that_passes_layers_without_a_marker():
    def loss(params, x):
        x = layer_boundary(x)
        total = jnp.zeros(())
        for w in params:
            hidden = dense(x, w)
            total = total * 0.5 + hidden.mean()
            x = layer_boundary(hidden * (1 + total))
        return x.mean()

    text = text_of(loss, matrices(WIDTH, WIDTH, WIDTH))
    assert "layer 1 reads float32[], which layer 0 made and no marker carries" in text
    assert "mark everything that passes on in one call: x, aux = layer_boundary((x, aux))" in text


def test_activations_between_layers_read_after_them():
    def loss(params, x):
        x = first = layer_boundary(x)
        for w in params:
            x = layer_boundary(dense(x, w))
        return (x + first).mean()

    text = text_of(loss, matrices(WIDTH, WIDTH))
    assert "the activations before layer 0 are read after the layers (" in text


def test_a_parameter_that_some_layers_share():
    def loss(params, x):
        return marked([lambda x, w=w: dense(x, w) for w in (params[0], params[0], params[1])], x)

    text = text_of(loss, matrices(WIDTH, WIDTH))
    assert "some layers share a parameter and others do not" in text


def test_a_loss_that_fails_by_itself_says_so_itself():
    with pytest.raises(TypeError, match="dot_general"):
        cut(lambda params, x: (x @ np.ones((3, 3), np.float32)).mean(), {"w": MATRICES}, X)
