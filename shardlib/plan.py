"""Plan: everything that decides the parallelism of a run, as one frozen value with a JSON form.

In: mesh text and rules. Out: a value to bind a model with, to compare, to keep beside a run.

    plan = Plan(mesh="data=2,tensor=4")
    assert Plan.from_json(plan.to_json()) == plan
"""

import json
from dataclasses import dataclass, field
from typing import Any

from meshes.errors import ShardingError, nearest
from meshes.shape import MeshShape
from shardlib.rules import Rules
from shardlib.strategies import default_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the parallelism of a run is decided by; a static leaf.

    Args:
        mesh: mesh text or shape; at most one size is -1, to be inferred from the devices.
        rules: logical to mesh axes; by default the rules of all strategies.
    """

    mesh: MeshShape
    rules: Rules = field(default_factory=default_rules)

    def __post_init__(self):
        # Text is accepted for the mesh because people write it by hand; the field is always a MeshShape.
        object.__setattr__(self, "mesh", MeshShape.parse(self.mesh))
        if not isinstance(self.rules, Rules):
            raise ShardingError(
                f"a plan's rules are a Rules value, not {type(self.rules).__name__}",
                fix='use Rules.parse(["batch -> data", ...])',
            )

    def to_json(self) -> str:
        """The plan as a JSON document; rules are kept as TOML text inside it."""
        return json.dumps({"mesh": str(self.mesh), "rules": self.rules.to_toml()}, indent=2)

    @classmethod
    def from_json(cls, text: str, /) -> "Plan":
        """Reads what `to_json` wrote.

        Raises:
            ShardingError: not JSON, a missing or unknown key, or a value that does not parse.
        """
        try:
            document: Any = json.loads(text)
        except (ValueError, RecursionError) as error:  # malformed, or nested too deep
            raise ShardingError(f"plan: not JSON: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("mesh"), str):
            raise ShardingError('plan: "mesh" is missing or not text', fix='write {"mesh": "data=2,tensor=4"}')
        for key in document:
            if key not in ("mesh", "rules"):
                raise ShardingError(f"plan: unknown key {key!r}{nearest(key, ('mesh', 'rules'))}")
        if "rules" not in document:
            return cls(mesh=MeshShape.parse(document["mesh"]))
        if not isinstance(document["rules"], str):
            raise ShardingError('plan: "rules" is not text', fix="put the rules' TOML document there")
        rules = Rules.from_toml(document["rules"], base=default_rules(), source="plan rules")
        return cls(mesh=MeshShape.parse(document["mesh"]), rules=rules)
