"""What every example model keeps: inert and well-formed annotations, no `jax.jit`, no imports beyond its few."""

import ast
from pathlib import Path

import jax
import pytest
from flax import nnx

from models import gpt, gpt_nnx, llama
from shardlib import annotate

SOURCES = sorted(Path(gpt.__file__).parent.glob("*.py"))
RESIDUAL = ("batch", "length", "embed")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_no_jit_and_few_imports(source):
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Attribute) and node.attr in ("jit", "pjit")), f"{source.name}:{node.lineno}"
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for module in modules:
            if module.split(".")[0] == "shardlib":
                allowed = ("shardlib", "shardlib.annotate", "shardlib.loss", "shardlib.batch_spec")
                assert module in allowed or module.startswith("shardlib.layers"), module
            elif module.split(".")[0] in ("meshes", "benchmarks", "numpy"):
                raise AssertionError(f"{source.name} imports {module}")


@pytest.mark.parametrize("example", [gpt.small, gpt_nnx.small, llama.tiny], ids=lambda example: example.__module__)
def test_activations_are_named_at_their_rank(example):
    module, loss, spec = example(layers=2)
    seen = []

    def record(x, names):
        assert len(names) == x.ndim, (names, x.shape)
        seen.append((names, x.shape))
        return x

    batch = {name: leaf.abstract() for name, leaf in spec.items()}
    if example is gpt.small:
        params = jax.eval_shape(module.init, jax.random.key(0), batch["inputs"])["params"]
        params = jax.tree.map(
            lambda leaf: leaf.value, params, is_leaf=lambda leaf: isinstance(leaf, annotate.LogicalAxes)
        )
    else:
        params = nnx.eval_shape(lambda: nnx.state(module(nnx.Rngs(0))))
    active = annotate.Active(constrain=record)
    plain = jax.make_jaxpr(lambda params, batch: loss(params, batch, None))(params, batch)
    named = jax.make_jaxpr(annotate.under(active, lambda params, batch: loss(params, batch, None)))(params, batch)
    assert str(plain) == str(named)
    assert {names for names, _ in seen} == {
        RESIDUAL,
        ("batch", "length", "heads", "head_dim"),
        ("batch", "length", "kv_heads", "head_dim"),
        ("batch", "length", "mlp"),
        ("batch", "length", "vocab"),
    }
    layer = [names for names, _ in seen if names == RESIDUAL]
    assert len(layer) >= 3  # after the embedding and after both residual additions of the layer
    by_name = dict(zip(("batch", "length", "mlp"), (16, 128, 512 if example is not llama.tiny else 384), strict=True))
    for names, shape in seen:
        assert all(by_name.get(name, size) == size for name, size in zip(names, shape, strict=True))
