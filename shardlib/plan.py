"""Plan: everything that decides the parallelism of a run, as one frozen value with a JSON form.

In: mesh text, rules, options. Out: a value to bind a model with, to compare, to keep beside a run.

    plan = Plan(mesh="data=2,tensor=4", num_microbatches=4)
    assert Plan.from_json(plan.to_json()) == plan
"""

import html
import json
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args

from meshes.errors import ShardingError, nearest, raise_collected
from meshes.shape import INFERRED, MeshShape
from shardlib.pipeline.schedules import build
from shardlib.pipeline.table import Table
from shardlib.remat import Policy, parse_policy
from shardlib.rules import VOCAB, Rule, Rules
from shardlib.strategies import DATA_LIKE, default_rules

Lowering = Literal["automatic", "explicit"]
Gather = Literal["step", "microbatch"]
Dtype = Literal["float32", "bfloat16"]
Idle = Literal["skip", "mask"]
Balance = Literal["even", "cost"]
Attention = Literal["ring", "all_to_all", "gather"]
Vocabulary = Literal["gathered", "spread"]
Placement = Literal["contiguous", "zigzag", "striped"]
Kernels = Literal["fused", "reference"]
DATA: Final = "data"
STAGE: Final = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the parallelism of a run is decided by; a static leaf.

    Args:
        mesh: mesh text or shape; at most one size is -1, to be inferred from the devices.
        rules: logical to mesh axes; by default the rules of all strategies.
        lowering: of the data-like axes. "automatic": the compiler places their collectives. "explicit": parameters
            are gathered and gradients reduced by us, once per step. None chooses; see `chosen_lowering`.
        num_microbatches: parts of each device's rows, run one after another and accumulated.
        zero: 1 shards optimizer state over `data`, 2 also reduced gradients, 3 is fsdp on that axis.
        gather: explicit lowering only: sharded parameters are gathered once per "step" or per "microbatch".
        random_slices: into how many logical slices the batch is cut, each with its own key. None takes as many as
            the layout makes anyway, which is fast and makes dropout depend on the layout.
        compute_dtype: of parameters inside the loss; the stored parameters are float32.
        reduce_dtype: of gradients on the wire; explicit lowering only, when it differs from the compiler's choice.
        tensor_reduce_dtype: of sums over a tensor axis, forward and backward, in products that the model makes by
            `annotate.dot_general`. None: that of the products.
        remat: what a layer keeps for its backward pass: "full", "none", "dots", "names:...", "offload:..."; None
            leaves it to the model.
        schedule: of a pipeline, by name or as the text of a table (CSV); None takes 1f1b, or interleaved_1f1b with
            chunks. This and what follows is for meshes with a stage axis.
        chunks: virtual stages on each rank; None takes what the schedule has.
        residuals: what a stage keeps of each microbatch for its backward pass, a policy as for `remat`: "full" keeps
            the inputs of its layers, which run again one by one, "none" all that is read, and nothing runs again; or
            "stage" keeps the input of the stage alone, and all its layers run again together. None is "full".
        idle: "skip" branches around idle slots; "mask" computes in them and discards, for programs in which branches
            are not safe.
        balance: layers per stage: "even" where it divides, or by "cost", which counts embedding and head.
        vocabulary: parameters of embedding and head that a pipeline stores in parts over its stages are "gathered" once
            per step; or "spread": a vocabulary stays in parts, and all stages compute embedding and head together,
            for models with the layers of `shardlib.layers`.
        attention: where a context axis divides sequences: "ring" passes keys and values on, "all_to_all" exchanges
            heads for whole sequences, "gather" collects keys and values. None chooses by bytes.
        placement: which device holds which tokens: "contiguous", "zigzag" (an early and a late part) or "striped".
            None takes what balances the work, where the model can follow.
        kernels: attention by the "fused" kernels of the platform that a step is compiled for, where they take its
            calls, or by the "reference" everywhere.

    Raises:
        ShardingError: every option that cannot be, listed.
    """

    mesh: MeshShape
    rules: Rules = field(default_factory=default_rules)
    lowering: Lowering | None = None
    num_microbatches: int = 1
    zero: int = 0
    gather: Gather = "step"
    random_slices: int | None = None
    compute_dtype: Dtype = "float32"
    reduce_dtype: Dtype = "float32"
    tensor_reduce_dtype: Dtype | None = None
    remat: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    residuals: str | None = None
    idle: Idle = "skip"
    balance: Balance = "even"
    vocabulary: Vocabulary = "gathered"
    attention: Attention | None = None
    placement: Placement | None = None
    kernels: Kernels = "fused"

    def __post_init__(self):
        # Text is accepted for the mesh because people write it by hand; the field is always a MeshShape.
        object.__setattr__(self, "mesh", MeshShape.parse(self.mesh))
        if not isinstance(self.rules, Rules):
            raise ShardingError(
                f"a plan's rules are a Rules value, not {type(self.rules).__name__}",
                fix='use Rules.parse(["batch -> data", ...])',
            )
        raise_collected([*self._value_problems(), *self._combination_problems()], heading="the plan cannot be:")
        if self.remat is not None:
            parse_policy(self.remat)
        if self.is_pipeline:
            _ = self.kept_residuals, self.table()

    @property
    def is_pipeline(self) -> bool:
        """Whether layers are staged over the mesh."""
        return STAGE in self.mesh.names and self.mesh.size(STAGE) > 1

    @property
    def kept_residuals(self) -> Policy | None:
        """What the layers of a pipeline stage keep; None for the input of the stage alone."""
        return None if self.residuals == STAGE else parse_policy(self.residuals or "full")

    def table(self, num_microbatches: int | None = None) -> Table:
        """The schedule's table at the size of the mesh.

        Args:
            num_microbatches: other than the plan's.

        Raises:
            ShardingError: an unknown schedule, one that does not exist at this size, or a table of another size.
        """
        stages, microbatches = self.mesh.size(STAGE), num_microbatches or self.num_microbatches
        if self.schedule is not None and set(self.schedule.strip()) & set(", \n"):
            table = Table.parse(self.schedule, name="schedule")
            found = (table.num_ranks, table.num_microbatches)
            if found != (stages, microbatches):
                raise ShardingError(
                    f"the schedule's table is for {found[0]} stages and {found[1]} microbatches; the plan has "
                    f"stage={stages} and num_microbatches={microbatches}",
                    fix=f"stage={found[0]} and num_microbatches={found[1]}, or another table",
                )
            if self.chunks not in (None, table.num_chunks):
                raise ShardingError(
                    f"chunks={self.chunks}, and the schedule's table has {table.num_chunks}", fix="leave chunks out"
                )
            return table
        name = self.schedule or ("interleaved_1f1b" if (self.chunks or 1) > 1 else "1f1b")
        return build(name, stages=stages, chunks=self.chunks, microbatches=microbatches)

    def _value_problems(self) -> list[str]:
        problems = []
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                text = [str(choice) for choice in known if choice is not None]
                problems.append(f"{name}={value!r} is unknown{nearest(str(value), text)}; fix: use {' or '.join(text)}")
        for name, least in (("num_microbatches", 1), ("random_slices", 1), ("chunks", 1)):
            value = getattr(self, name)
            if value is None and name in ("random_slices", "chunks"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                problems.append(f"{name}={value!r} is not a positive integer; fix: {name}=1")
        return problems

    def _combination_problems(self) -> list[str]:
        problems = []
        if self.zero and DATA not in self.mesh.names:
            problems.append(
                f"zero={self.zero} shards over the data axis, and mesh {self.mesh} has none; fix: name data=N"
            )
        if self.lowering == "automatic" and self.reduce_dtype != self.compute_dtype:
            problems.append(
                f"reduce_dtype={self.reduce_dtype} with compute_dtype={self.compute_dtype}: under the automatic "
                "lowering the compiler reduces gradients in the dtype of their products; fix: lowering=explicit"
            )
        if self.lowering == "automatic" and self.gather != "step":
            problems.append("gather is a choice of the explicit lowering; fix: lowering=explicit, or leave gather out")
        if (self.tensor_reduce_dtype, self.compute_dtype) == ("bfloat16", "float32"):
            problems.append(
                "tensor_reduce_dtype=bfloat16 with compute_dtype=float32: the compiler adds partial products in their "
                "own dtype or a wider one; fix: compute_dtype=bfloat16, or leave tensor_reduce_dtype out"
            )
        return [*problems, *self._pipeline_problems(), *self._context_problems()]

    def _context_problems(self) -> list[str]:
        if "context" in self.mesh.names and self.mesh.size("context") != 1:
            if self.lowering == "automatic" and (self.random_slices or 1) > 1:
                return [
                    "random_slices with a context axis under the automatic lowering: JAX maps no partly manual region "
                    "over a sharded dim; fix: lowering=explicit, or leave random_slices out"
                ]
            return []
        return [
            f"{name}={value!r} is for divided sequences, and mesh {self.mesh} has no context axis; fix: name "
            f"context=N, or leave {name} out"
            for name, value in {"attention": self.attention, "placement": self.placement}.items()
            if value is not None
        ]

    def _pipeline_problems(self) -> list[str]:
        if not self.is_pipeline:
            given: dict[str, Any] = {"chunks": self.chunks, "residuals": self.residuals}
            given["schedule"] = None if self.schedule is None else self.schedule.strip().splitlines()[0]
            given |= {"idle": None if self.idle == "skip" else self.idle}
            given |= {"balance": None if self.balance == "even" else self.balance}
            given |= {"vocabulary": None if self.vocabulary == "gathered" else self.vocabulary}
            return [
                f"{name}={value!r} is for a pipeline, and mesh {self.mesh} has no stage axis; fix: name stage=N, or "
                f"leave {name} out"
                for name, value in given.items()
                if value is not None
            ]
        problems = []
        if self.lowering == "automatic":
            problems.append(
                "lowering=automatic with a stage axis: a pipeline accumulates gradients locally and reduces them once; "
                "fix: lowering=explicit, or leave lowering out"
            )
        if self.remat is not None:
            problems.append(
                f"remat={self.remat!r} with a stage axis: one policy decides what a stage keeps; fix: "
                f"residuals={self.remat!r}"
            )
        return problems

    @property
    def chosen_lowering(self) -> tuple[Lowering, str]:
        """The lowering and why: explicit for accumulation, reduced precision or a gather option, else automatic."""
        if self.lowering is not None:
            return self.lowering, "the plan says so"
        if self.is_pipeline:
            return "explicit", "a pipeline accumulates its microbatches locally and reduces once"
        if self.mesh.size("context") > 1 and (self.random_slices or 1) > 1:
            return "explicit", "logical slices of divided sequences run one device's at a time"
        if self.num_microbatches > 1:
            return "explicit", f"{self.num_microbatches} microbatches are accumulated locally and reduced once"
        if self.compute_dtype != "float32":
            return "explicit", f"gradients of {self.compute_dtype} products are reduced in {self.reduce_dtype}"
        if self.gather != "step":
            return "explicit", f"gather={self.gather}"
        return "automatic", "one microbatch in float32: the compiler places the collectives"

    @property
    def vocab_shards(self) -> int:
        """Into how many shards the rules pad vocabularies, those over stages included; 1 where nothing is padded."""
        shards = self.rules.vocab_shards(self.mesh)
        pads = any(rule.logical == VOCAB and rule.indivisible == "pad" for rule in self.rules.rules)
        return shards * (self.mesh.size(STAGE) if pads and self.is_pipeline and self.vocabulary == "spread" else 1)

    @property
    def cuts_batch(self) -> str | None:
        """What cuts the batch into parts whose losses are added up, or None when it stays whole."""
        lowering, why = self.chosen_lowering
        if self.num_microbatches > 1:
            return f"{self.num_microbatches} microbatches"
        if lowering == "explicit" and self.num_batch_shards > 1:
            return f"explicit lowering over {self.num_batch_shards} shards, because {why}"
        return f"random_slices={self.random_slices}" if (self.random_slices or 1) > 1 else None

    @property
    def choices(self) -> tuple[str, ...]:
        """What the plan decided where it had a choice, in words, for `explain`."""
        lowering, why = self.chosen_lowering
        lines = [f"lowering: {lowering}, because {why}"]
        if lowering == "explicit":
            lines.append(f"sharded parameters are gathered once per {self.gather}, as {self.compute_dtype}")
            lines.append(f"gradients are reduced once per step, as {self.reduce_dtype}")
        if self.zero in (1, 2):
            also = " and reduced gradients" if self.zero == 2 else ""
            lines.append(f"zero={self.zero}: optimizer state{also} sharded over data={self.mesh.size(DATA)}")
        if self.zero == 3:
            lines.append("zero=3 is fsdp on the data axis: parameters are sharded along embed over data too")
        if self.mesh.size("tensor") > 1 or self.tensor_reduce_dtype is not None:
            why = "" if self.tensor_reduce_dtype else ", the dtype of the products"
            lines.append(
                f"partial products are added over tensor as {self.tensor_reduce_dtype or self.compute_dtype}{why}"
            )
        if self.remat is not None:
            lines.append(f"remat: {self.remat}")
        if self.is_pipeline:
            table = self.table()
            chunks = f", {table.placement.num_chunks} chunks" if table.placement.num_chunks > 1 else ""
            lines.append(
                f"schedule: {table.name}, {self.num_microbatches} microbatches{chunks}, idle slots: {self.idle}"
            )
            lines.append(f"residuals: {self.residuals or 'full'}")
            lines += ["vocabulary: spread over the stages"] if self.vocabulary == "spread" else []
        return tuple(lines)

    @property
    def placement_rules(self) -> Rules:
        """The rules that place parameters: with zero=3 the data axis shards embed too, which is fsdp on that axis."""
        if self.zero != 3 or INFERRED in self.mesh.sizes or self.mesh.size(DATA) == 1:
            return self.rules
        sharded = [
            replace(rule, mesh_axes=(*rule.mesh_axes, DATA)) if rule.mesh_axes == ("fsdp",) else rule
            for rule in self.rules.rules
        ]
        if sharded == list(self.rules.rules):
            sharded.insert(0, Rule(logical="embed", mesh_axes=(DATA,)))
        return replace(self.rules, rules=tuple(sharded))

    @property
    def num_batch_shards(self) -> int:
        """Into how many shards the data-like axes divide a batch."""
        shards = 1
        for axis in DATA_LIKE:
            shards *= self.mesh.size(axis)
        return shards

    def __str__(self) -> str:
        return "\n".join([f"plan for mesh {self.mesh} ({self.mesh.num_devices} devices)", *self.choices])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The plan as a JSON document; rules are kept as TOML text inside it."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps({**document, "mesh": str(self.mesh), "rules": self.rules.to_toml()}, indent=2)

    @classmethod
    def from_json(cls, text: str, /) -> "Plan":
        """Reads what `to_json` wrote; options may be left out.

        Raises:
            ShardingError: not JSON, a missing or unknown key, or a value that does not parse.
        """
        try:
            document: Any = json.loads(text)
        except (ValueError, RecursionError) as error:  # malformed, or nested too deep
            raise ShardingError(f"plan: not JSON: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("mesh"), str):
            raise ShardingError('plan: "mesh" is missing or not text', fix='write {"mesh": "data=2,tensor=4"}')
        known = [f.name for f in fields(cls)]
        raise_collected(
            [f"unknown key {key!r}{nearest(key, known)}" for key in document if key not in known], heading="plan:"
        )
        if "rules" in document:
            if not isinstance(document["rules"], str):
                raise ShardingError('plan: "rules" is not text', fix="put the rules' TOML document there")
            document["rules"] = Rules.from_toml(document["rules"], base=default_rules(), source="plan rules")
        for key in ("remat", "residuals", "schedule"):
            if not isinstance(document.get(key), str | None):
                raise ShardingError(f'plan: "{key}" is not text', fix=f'write {{"{key}": "..."}}')
        return cls(**document)


_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "lowering": (None, *get_args(Lowering)),
    "zero": (0, 1, 2, 3),
    "gather": get_args(Gather),
    "compute_dtype": get_args(Dtype),
    "reduce_dtype": get_args(Dtype),
    "tensor_reduce_dtype": (None, *get_args(Dtype)),
    "idle": get_args(Idle),
    "balance": get_args(Balance),
    "vocabulary": get_args(Vocabulary),
    "attention": (None, *get_args(Attention)),
    "placement": (None, *get_args(Placement)),
    "kernels": get_args(Kernels),
}
