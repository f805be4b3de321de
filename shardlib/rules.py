"""Rules: an ordered list from logical axes to mesh axes, with its text and TOML forms.

In: rule text such as "batch -> data+fsdp" or "vocab -> tensor; indivisible=replicate". Out: frozen values,
or one error that lists every mistake. Regex patterns give logical axes to models that carry none.

    rules = Rules.parse(["batch -> data", "mlp -> tensor", "embed -> none"])
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from meshes.errors import ShardingError, caret, nearest, raise_collected
from meshes.shape import MeshShape

Indivisible = Literal["error", "replicate", "next", "pad"]
Taken = Literal["keep", "error"]
Unknown = Literal["error", "replicate"]

_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_NONE: Final = "none"
_LOGICAL: Final = rf"{_NAME}(?:\[[0-9]+\])?"
_RULE = re.compile(rf"\s*({_NAME})\s*->\s*({_NAME}(?:\s*\+\s*{_NAME})*)\s*((?:;[^;]*)*)\Z")
VOCAB: Final = "vocab"
_OPTIONS: Final = {"indivisible": get_args(Indivisible), "taken": get_args(Taken), "beside": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line: a logical axis goes to these mesh axes, in this order, or deliberately nowhere; a static leaf.

    Args:
        logical: logical axis name.
        mesh_axes: mesh axes; empty means replicated on purpose.
        indivisible: when the mesh axes do not divide the dim: an error, replicate it, try the next rule, or pad it:
            that is for "vocab", in storage, by the layers and ops of `shardlib` that keep padding out of every result.
            None takes the rules' default.
        taken: when some of several mesh axes already split another dim: keep the free ones, or an error.
        beside: the rule holds only for arrays that also have a dim of this logical name.
    """

    logical: str
    mesh_axes: tuple[str, ...]
    indivisible: Indivisible | None = None
    taken: Taken = "keep"
    beside: str | None = None

    def __post_init__(self):
        if not re.fullmatch(_NAME, self.logical):
            raise ShardingError(
                f"rule {self}: {self.logical!r} is not a logical axis name", fix="use letters, digits, _"
            )
        if not isinstance(self.mesh_axes, tuple) or not all(_is_mesh_axis(axis) for axis in self.mesh_axes):
            raise ShardingError(
                f"rule for {self.logical!r}: {self.mesh_axes!r} is not a tuple of mesh axis names",
                fix='write ("fsdp",) or ("data", "fsdp"); the empty tuple, "none" in text, replicates',
            )
        twice = sorted({axis for axis in self.mesh_axes if self.mesh_axes.count(axis) > 1})
        if twice:
            raise ShardingError(
                f"rule {str(self)!r} uses mesh axis {twice[0]!r} twice: an axis can split a dim once",
                fix=f'write "{self.logical} -> {"+".join(dict.fromkeys(self.mesh_axes))}"',
            )
        _check_option("indivisible", self.indivisible or "error", str(self))
        if self.indivisible == "pad" and self.logical != VOCAB:
            raise ShardingError(
                f"rule {str(self)!r}: padding stays out of the results of a vocabulary only",
                fix='write indivisible=replicate, or "vocab -> tensor; indivisible=pad"',
            )
        _check_option("taken", self.taken, str(self))
        if self.beside is not None:
            _check_option("beside", self.beside, str(self))

    @classmethod
    def parse(cls, text: str, /) -> "Rule":
        """Reads `"logical -> axis+axis; option=value"`; `none` on the right replicates.

        Raises:
            ShardingError: with a caret under the first wrong character.
        """
        match = _RULE.match(text)
        if not match:
            raise _syntax_error(text)
        logical, targets, options_text = match.groups()
        axes = tuple(axis.strip() for axis in targets.split("+"))
        options: dict[str, Any] = {}
        for option in filter(None, (part.strip() for part in options_text.split(";"))):
            key, _, value = (part.strip() for part in option.partition("="))
            _check_option(key, value, text)
            if key in options:
                raise ShardingError(f"rule {text!r}: option {key!r} is given twice", fix="give it once")
            options[key] = value
        return cls(logical=logical, mesh_axes=() if axes == (_NONE,) else axes, **options)

    def __str__(self) -> str:
        options = [("indivisible", self.indivisible), ("taken", self.taken if self.taken != "keep" else None)]
        options.append(("beside", self.beside))
        tail = "".join(f"; {key}={value}" for key, value in options if value is not None)
        return f"{self.logical} -> {'+'.join(self.mesh_axes) or _NONE}{tail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Ordered rules, and patterns for arrays without annotations; a static leaf.

    For each dim, left to right, the first rule for its name wins whose mesh axes exist with size above 1, are not
    taken by another dim of the array, and divide the dim.

    Args:
        rules: in order of preference.
        patterns: `(regex, logical axes)`; the first whose regex matches the whole path names an array's dims.
        indivisible: the policy of rules that state none.
        unknown: what a logical name without any rule does: an error, or replicate and be listed.

    Raises:
        ShardingError: every rule that can never fire and every bad pattern, listed.
    """

    rules: tuple[Rule, ...]
    patterns: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    indivisible: Indivisible = "error"
    unknown: Unknown = "error"

    def __post_init__(self):
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ShardingError("rules must be a tuple of Rule", fix='use Rules.parse(["batch -> data", ...]) for text')
        failures: list[str] = []
        for index, rule in enumerate(self.rules):
            earlier = next((other for other in self.rules[:index] if _shadows(other, rule, self.indivisible)), None)
            if earlier is not None:
                failures.append(f"rule {str(rule)!r} can never fire: {str(earlier)!r} comes first; fix: delete one")
                if set(rule.mesh_axes) < set(earlier.mesh_axes):
                    failures[-1] += f', or write "{replace(earlier, indivisible="next")}"'
        for index, (regex, names) in enumerate(self.patterns):
            failures += _pattern_failures(regex, names)
            if any(regex == other for other, _ in self.patterns[:index]):
                failures.append(f"pattern {regex!r} can never fire: it is there before; fix: delete one")
        for key, value, known in (
            ("indivisible", self.indivisible, tuple(v for v in get_args(Indivisible) if v != "pad")),
            ("unknown", self.unknown, get_args(Unknown)),
        ):
            if value not in known:
                failures.append(
                    f"{key} = {value!r} is unknown{nearest(str(value), known)}; fix: use {' or '.join(known)}"
                )
        raise_collected(failures, heading="the rules cannot be used:")

    @classmethod
    def parse(cls, lines: Iterable[str], /, **options: Any) -> "Rules":
        """Rules from lines of rule text; options are the fields of `Rules`. Every bad line is listed."""
        if isinstance(lines, str):
            raise ShardingError(f"rules are a list of lines, not the text {lines!r}", fix=f"write [{lines!r}]")
        rules: list[Rule] = []
        failures: list[str] = []
        for line in lines:
            try:
                rules.append(Rule.parse(line))
            except ShardingError as error:
                failures.append(str(error))
        raise_collected(failures, heading="the rules cannot be read:")
        return cls(rules=tuple(rules), **options)

    def for_name(self, logical: str) -> tuple[Rule, ...]:
        """The rules for one logical axis, in order."""
        return tuple(rule for rule in self.rules if rule.logical == logical)

    def vocab_shards(self, mesh: MeshShape) -> int:
        """Into how many shards vocabularies are divided by a rule that pads them; 1 without such a rule."""
        padding = (rule for rule in self.for_name(VOCAB) if rule.indivisible == "pad")
        axes = next((rule.mesh_axes for rule in padding), ())
        return math.prod(mesh.size(axis) for axis in axes if axis in mesh.names)

    def with_first(self, extra: "Rules") -> "Rules":
        """`extra` placed before these rules; rules that `extra` makes unreachable are dropped."""
        shadowed = lambda rule: any(_shadows(other, rule, extra.indivisible) for other in extra.rules)  # noqa: E731
        kept = [rule for rule in self.rules if not shadowed(rule)]
        patterns = dict((*self.patterns, *extra.patterns))
        ordered = {regex: patterns[regex] for regex, _ in (*extra.patterns, *self.patterns)}
        return replace(extra, rules=(*extra.rules, *kept), patterns=tuple(ordered.items()))

    def to_toml(self) -> str:
        """The rules as a TOML document that `from_toml` reads back."""
        lines = [f"{key} = {_quoted(value)}" for key, value in self._settings().items()]
        lines += ["rules = [", *(f"  {_quoted(str(rule))}," for rule in self.rules), "]"]
        if self.patterns:
            lines += ["", "[patterns]"]
            for regex, names in self.patterns:
                axes = ", ".join(_quoted(_NONE if name is None else name) for name in names)
                lines.append(f"{_quoted(regex)} = [{axes}]")
        return "\n".join(lines) + "\n"

    def _settings(self) -> dict[str, str]:
        return {"indivisible": self.indivisible, "unknown": self.unknown}

    @classmethod
    def from_toml(cls, text: str, /, *, base: "Rules | None" = None, source: str = "rules") -> "Rules":
        """Reads a TOML document with `rules`, `[patterns]`, `indivisible`, `unknown`, `extends`.

        Args:
            text: the document.
            base: what `extends = "default"` puts after the document's own rules.
            source: what errors call the document, such as its file name.

        Raises:
            ShardingError: not TOML, an unknown key, or any bad rule, with the place.
        """
        try:
            document = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # tomllib: malformed, an integer of 5,000 digits, deep nesting
            raise ShardingError(
                f"{source}: not a TOML document: {error}", fix='write rules = ["batch -> data"]'
            ) from None
        known = ("extends", "indivisible", "patterns", "rules", "unknown")
        failures = [f"unknown key {key!r}{nearest(key, known)}" for key in document if key not in known]
        lines, patterns = document.get("rules", []), document.get("patterns", {})
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            failures.append('rules must be a list of text; fix: rules = ["batch -> data", "mlp -> tensor"]')
        if not isinstance(patterns, Mapping) or not all(_is_names(names) for names in patterns.values()):
            failures.append('[patterns] must map a regex to a list of axes; fix: ".*/kernel" = ["embed", "mlp"]')
        extends = document.get("extends")
        if extends not in (None, "default"):
            failures.append(f'extends = {extends!r} is unknown; fix: extends = "default", or leave it out')
        elif extends and base is None:
            failures.append(f"extends = {extends!r} needs the rules to extend; fix: pass base=default_rules()")
        raise_collected(failures, heading=f"{source}:")
        options = {key: document[key] for key in ("indivisible", "unknown") if key in document}
        options["patterns"] = tuple((k, tuple(None if n == _NONE else n for n in v)) for k, v in patterns.items())
        try:
            own = cls.parse(lines, **options)
        except ShardingError as error:
            raise ShardingError(f"{source}: {error}") from None
        return base.with_first(own) if extends and base is not None else own


def _shadows(earlier: Rule, later: Rule, indivisible: Indivisible) -> bool:
    """True when `earlier` always decides before `later` could: it never passes on a dim that `later` would split.

    After "mlp -> fsdp+tensor" the rule "mlp -> tensor" is dead: wherever tensor is free, the first takes it, unless
    its sizes do not divide and its policy is to try the next rule.
    """
    if earlier.logical != later.logical or earlier.beside not in (None, later.beside):
        return False
    if not earlier.mesh_axes:
        return True
    if (earlier.indivisible or indivisible) == "next":
        return set(later.mesh_axes) == set(earlier.mesh_axes)
    return bool(later.mesh_axes) and set(later.mesh_axes) <= set(earlier.mesh_axes)


def _is_mesh_axis(axis: Any) -> bool:
    return isinstance(axis, str) and bool(re.fullmatch(_NAME, axis)) and axis != _NONE


def _pattern_failures(regex: str, names: Any) -> list[str]:
    failures: list[str] = []
    try:
        re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        failures.append(f"pattern {regex!r} is not a regular expression: {error}")
    if not isinstance(names, tuple):
        failures.append(f'pattern {regex!r}: the axes must be a list, such as ["embed", "mlp"]')
        return failures
    wrong = [name for name in names if name is not None and (not re.fullmatch(_LOGICAL, name) or name == _NONE)]
    return failures + [f"pattern {regex!r}: {name!r} is not a logical axis name" for name in wrong]


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_option(key: str, value: str, text: str) -> None:
    if key not in _OPTIONS:
        raise ShardingError(
            f"rule {text!r}: unknown option {key!r}{nearest(key, _OPTIONS)}", fix="use indivisible, taken or beside"
        )
    known = _OPTIONS[key]
    if known is not None and value not in known:
        raise ShardingError(
            f"rule {text!r}: {key}={value!r} is unknown{nearest(value, known)}", fix=f"use {' or '.join(known)}"
        )
    if known is None and not re.fullmatch(_NAME, value):
        raise ShardingError(f"rule {text!r}: {key}={value!r} is not a logical axis name")


def _syntax_error(text: str) -> ShardingError:
    """Points at the first character that does not fit `logical -> axis+axis; option=value`."""
    stages = (rf"\s*{_NAME}", r"\s*->", rf"\s*{_NAME}", rf"(?:\s*\+\s*{_NAME})*")
    position = 0
    for stage in stages:
        match = re.compile(stage).match(text, position)
        if not match:
            break
        position = match.end()
    position += len(text[position:]) - len(text[position:].lstrip())
    return ShardingError(
        f"rule {text!r} cannot be read here:\n{caret(text, position)}",
        fix='write "batch -> data+fsdp", "embed -> none" or "vocab -> tensor; indivisible=replicate"',
    )
