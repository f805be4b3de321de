from meshes.build import abstract_mesh as abstract_mesh
from meshes.build import make_mesh as make_mesh
from meshes.errors import ShardingError as ShardingError
from meshes.shape import MeshShape as MeshShape
from shardlib import annotate as annotate
from shardlib import pipeline as pipeline
from shardlib._version import __version__ as __version__
from shardlib.annotate import attention as attention
from shardlib.annotate import constrain as constrain
from shardlib.annotate import layer_boundary as layer_boundary
from shardlib.batch_spec import ArraySpec as ArraySpec
from shardlib.binding import bind as bind
from shardlib.loss import Loss as Loss
from shardlib.loss import Mean as Mean
from shardlib.loss import Sum as Sum
from shardlib.place import shardings as shardings
from shardlib.place import with_rules as with_rules
from shardlib.plan import Plan as Plan
from shardlib.rules import Rules as Rules
from shardlib.specs import resolve as resolve
from shardlib.strategies import default_rules as default_rules
from shardlib.trainer import Trainer as Trainer

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
