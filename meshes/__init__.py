"""Device meshes by name: `make_mesh("data=2,tensor=4")`. Names load on first use, so importing asks for nothing."""

import importlib
from typing import Any

_HOME = {
    "MeshShape": "meshes.shape",
    "ShardingError": "meshes.errors",
    "abstract_mesh": "meshes.build",
    "make_mesh": "meshes.build",
    "shape_of": "meshes.build",
}
__all__ = ["MeshShape", "ShardingError", "abstract_mesh", "make_mesh", "shape_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshes' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
