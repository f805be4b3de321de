"""Name the axes of a Flax model, name a mesh, and train it there with the numbers of one device.

Names load on first use (PEP 562), so importing this package imports no JAX and asks for no device.
"""

import importlib
from typing import Any

from shardlib._version import __version__

_HOME = {
    "ArraySpec": "shardlib.batch_spec",
    "Loss": "shardlib.loss",
    "Mean": "shardlib.loss",
    "MeshShape": "meshes.shape",
    "Plan": "shardlib.plan",
    "Rules": "shardlib.rules",
    "ShardingError": "meshes.errors",
    "Sum": "shardlib.loss",
    "Trainer": "shardlib.trainer",
    "abstract_mesh": "meshes.build",
    "annotate": "shardlib.annotate",
    "attention": "shardlib.annotate",
    "bind": "shardlib.binding",
    "constrain": "shardlib.annotate",
    "default_rules": "shardlib.strategies",
    "layer_boundary": "shardlib.annotate",
    "make_mesh": "meshes.build",
    "pipeline": "shardlib.pipeline",
    "resolve": "shardlib.specs",
    "shardings": "shardlib.place",
    "with_rules": "shardlib.place",
}
__all__ = [
    "ArraySpec",
    "Loss",
    "Mean",
    "MeshShape",
    "Plan",
    "Rules",
    "ShardingError",
    "Sum",
    "Trainer",
    "__version__",
    "abstract_mesh",
    "annotate",
    "attention",
    "bind",
    "constrain",
    "default_rules",
    "layer_boundary",
    "make_mesh",
    "pipeline",
    "resolve",
    "shardings",
    "with_rules",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if name in ("annotate", "pipeline") else getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)
