"""Importing asks for nothing: no JAX, no device; the surface is small; models hold no jit; modules stay readable."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshes
import shardlib

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path for package in ("meshes", "shardlib", "models", "benchmarks") for path in (ROOT / package).rglob("*.py")
)
IDLE = "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["shardlib", "meshes", "meshes.shape", "shardlib.rules", "shardlib.cli"])
def test_importing_loads_no_jax(name):
    run_python(f"import sys, {name}; assert not {{'jax', 'flax', 'optax'}} & set(sys.modules), sorted(sys.modules)")


@pytest.mark.newest
def test_binding_and_explaining_start_no_backend():
    run_python(
        "import optax, shardlib as sl\n"
        "import models.gpt, models.llama\n"
        "for example in (models.gpt.small(), models.llama.tiny()):\n"
        "    model, loss, spec = example\n"
        "    bound = sl.bind(model, loss, sl.Plan(mesh='data=4,tensor=2'), spec)\n"
        "    assert 'tensor' in str(bound.explain(optax.sgd(0.1)))\n"
        f"{IDLE}"
    )


@pytest.mark.parametrize("package", [meshes, shardlib])
def test_the_stub_lists_the_public_names(package):
    assert len(package.__all__) <= 30
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    (names,) = [node.value for node in stub.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    imported = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(ast.literal_eval(names)) == sorted(package.__all__) == sorted(imported)
    for name in package.__all__:
        assert getattr(package, name).__doc__ or name == "__version__"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        package.nonsense  # noqa: B018


def test_models_hold_no_jit():
    for path in (ROOT / "models").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in ("jit", "pjit"), f"{path}:{node.lineno}: rules would be stale inside {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_outgrows_a_reader(path):
    assert len(path.read_text().splitlines()) <= 500


def test_private_jax_is_in_one_module():
    for path in MODULES:
        if path.name != "jax_compat.py":
            for node in ast.walk(ast.parse(path.read_text())):
                module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module or ""]
                assert not any(name.startswith("jax._src") for name in names), f"{path}:{node.lineno}"
