from meshes.build import abstract_mesh as abstract_mesh
from meshes.build import make_mesh as make_mesh
from meshes.build import shape_of as shape_of
from meshes.errors import ShardingError as ShardingError
from meshes.shape import MeshShape as MeshShape

__all__ = ["MeshShape", "ShardingError", "abstract_mesh", "make_mesh", "shape_of"]
