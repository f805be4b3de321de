"""Rule text and TOML: round trips, one error type for any text, dead rules, and every mistake listed at once."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshes.errors import ShardingError
from shardlib.rules import Rule, Rules
from shardlib.strategies import default_rules

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda name: name != "none")
RULES = st.builds(
    Rule,
    logical=NAMES,
    mesh_axes=st.lists(NAMES, max_size=3, unique=True).map(tuple),
    indivisible=st.sampled_from([None, "error", "replicate", "next"]),
    taken=st.sampled_from(["keep", "error"]),
    beside=st.none() | NAMES,
)
PATTERNS = st.dictionaries(
    st.text(max_size=12).filter(lambda text: _is_regex(text)), st.lists(st.none() | NAMES, max_size=3), max_size=3
)


def _is_regex(text: str) -> bool:
    try:
        Rules(rules=(), patterns=((text, ()),))
    except ShardingError:
        return False
    return True


def _no_dead(rules: list[Rule]) -> tuple[Rule, ...]:
    return tuple({rule.logical: rule for rule in rules}.values())


@given(RULES)
def test_rule_text_round_trips(rule):
    assert Rule.parse(str(rule)) == rule


@pytest.mark.newest
@given(
    st.lists(RULES, max_size=4).map(_no_dead),
    PATTERNS,
    st.sampled_from(["error", "replicate", "next"]),
    st.sampled_from(["error", "replicate"]),
)
def test_toml_round_trips(rules, patterns, indivisible, unknown):
    value = Rules(
        rules=rules,
        patterns=tuple((regex, tuple(names)) for regex, names in patterns.items()),
        indivisible=indivisible,
        unknown=unknown,
    )
    assert Rules.from_toml(value.to_toml()) == value


def test_default_rules_round_trip():
    assert Rules.from_toml(default_rules().to_toml()) == default_rules()


@given(st.text(max_size=40) | st.text(alphabet="ab-> +;=none\n", max_size=24))
def test_any_rule_text_parses_or_raises_only_our_error(text):
    try:
        rule = Rule.parse(text)
    except ShardingError:
        return
    assert Rule.parse(str(rule)) == rule


TOML_PIECES = ["rules = [", "]", '"a -> b"', '"a -> b+b"', "[patterns]\n", '".*" = ', "[1]", '["x"]', "\n", "unknown"]
TOML_PIECES += [" = ", '"error"', "indivisible", "extends", '"default"', ",", '"(" = ["x"]', "1979-13-01", "{", "'''"]


@given(st.text(max_size=60) | st.lists(st.sampled_from(TOML_PIECES), max_size=9).map("".join))
@example("a = " + "[" * 20_000)
@example("a = " + "1" * 5_000)
@example('[patterns]\n"a{99999999999}" = ["x"]')
@example('[patterns]\n"' + "(" * 5_000 + '" = ["x"]')
def test_any_toml_text_parses_or_raises_only_our_error(text):
    try:
        rules = Rules.from_toml(text, base=default_rules())
    except ShardingError:
        return
    assert Rules.from_toml(rules.to_toml()) == rules


@pytest.mark.parametrize(
    ("text", "wrong_at", "says"),
    [
        ("batch data", "data", "cannot be read here"),
        ("batch -> ", "", "cannot be read here"),
        ("-> data", "-", "cannot be read here"),
        ("batch -> data + ", "+", "cannot be read here"),
        ("batch -> 3", "3", "cannot be read here"),
        ("batch -> data fsdp", "fsdp", "cannot be read here"),
    ],
)
def test_syntax_errors_point_at_the_place(text, wrong_at, says):
    with pytest.raises(ShardingError) as caught:
        Rule.parse(text)
    lines = str(caught.value).splitlines()
    assert says in lines[0]
    assert lines[1][2:] == text
    assert text[lines[2].index("^") - 2 :].startswith(wrong_at)
    assert 'fix: write "batch -> data+fsdp"' in lines[-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mlp -> tensor+tensor", "uses mesh axis 'tensor' twice: an axis can split a dim once"),
        ("mlp -> tensor; indivisable=next", r"unknown option 'indivisable' (did you mean 'indivisible'?)"),
        ("mlp -> tensor; indivisible=nxt", "indivisible='nxt' is unknown (did you mean 'next'?)"),
        ("mlp -> tensor; indivisible=next; indivisible=error", "option 'indivisible' is given twice"),
        ("mlp -> tensor; beside=3d", "beside='3d' is not a logical axis name"),
        ("mlp -> tensor+none", "is not a tuple of mesh axis names"),
    ],
)
def test_rule_mistakes_are_named(text, says):
    with pytest.raises(ShardingError) as caught:
        Rule.parse(text)
    assert says in str(caught.value)


def test_a_repeated_axis_offers_the_corrected_rule():
    with pytest.raises(ShardingError, match=r'fix: write "mlp -> tensor\+fsdp"'):
        Rule.parse("mlp -> tensor+fsdp+tensor")


@pytest.mark.parametrize("mesh_axes", ["fsdp", ["fsdp"], ("none",), ("a b",), (None,)])
def test_rules_built_by_hand_are_validated(mesh_axes):
    with pytest.raises(ShardingError, match="is not a tuple of mesh axis names"):
        Rule(logical="embed", mesh_axes=mesh_axes)


def test_one_text_instead_of_a_list_of_lines():
    with pytest.raises(ShardingError, match="rules are a list of lines, not the text 'batch -> data'"):
        Rules.parse("batch -> data")
    with pytest.raises(ShardingError, match="rules must be a tuple of Rule"):
        Rules(rules=["batch -> data"])


def test_every_bad_line_is_listed():
    with pytest.raises(ShardingError) as caught:
        Rules.parse(["batch -> data", "embed fsdp", "mlp -> tensor+tensor"])
    text = str(caught.value)
    assert "the rules cannot be read" in text
    assert "'embed fsdp'" in text
    assert "'mlp -> tensor+tensor'" in text


@pytest.mark.parametrize(
    ("lines", "dead"),
    [
        (["mlp -> tensor", "mlp -> tensor"], "mlp -> tensor"),
        (["mlp -> none", "mlp -> tensor"], "mlp -> tensor"),
        (["mlp -> fsdp+tensor", "mlp -> tensor"], "mlp -> tensor"),
        (["mlp -> fsdp+tensor; indivisible=replicate", "mlp -> tensor"], "mlp -> tensor"),
        (["mlp -> fsdp+tensor; indivisible=next", "mlp -> tensor+fsdp"], "mlp -> tensor+fsdp"),
        (["mlp -> tensor", "mlp -> tensor; beside=embed"], "mlp -> tensor; beside=embed"),
    ],
)
def test_a_rule_that_can_never_fire_is_an_error(lines, dead):
    with pytest.raises(ShardingError) as caught:
        Rules.parse(lines)
    text = str(caught.value)
    assert f"rule {dead!r} can never fire: {lines[0]!r} comes first; fix: delete one" in text


@pytest.mark.parametrize(
    "lines",
    [
        ["mlp -> tensor", "mlp -> fsdp"],
        ["mlp -> tensor", "mlp -> none"],
        ["mlp -> tensor; beside=embed", "mlp -> tensor"],
        ["mlp -> tensor; beside=embed", "mlp -> tensor; beside=heads"],
        ["mlp -> fsdp+tensor; indivisible=next", "mlp -> tensor"],
        ["mlp -> tensor", "mlp -> fsdp+tensor"],
        ["mlp -> tensor", "embed -> tensor"],
    ],
)
def test_rules_that_can_fire_are_not_called_dead(lines):
    assert len(Rules.parse(lines).rules) == 2


def test_extra_rules_come_first_and_drop_what_they_shadow():
    rules = default_rules().with_first(Rules.parse(["embed -> none", "new -> data"]))
    assert [str(rule) for rule in rules.for_name("embed")] == ["embed -> none"]
    assert str(rules.rules[0]) == "embed -> none"
    assert rules.for_name("mlp") == default_rules().for_name("mlp")
    again = rules.with_first(Rules.parse([], patterns=((".*", ("embed",)),)))
    assert again.with_first(Rules.parse([], patterns=((".*", ("mlp",)),))).patterns == ((".*", ("mlp",)),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('rules = ["batch -> data"', "rules.toml: not a TOML document"),
        ('rule = ["batch -> data"]', "unknown key 'rule' (did you mean 'rules'?)"),
        ("rules = 3", 'rules must be a list of text; fix: rules = ["batch -> data", "mlp -> tensor"]'),
        ('[patterns]\nk = "embed"', "[patterns] must map a regex to a list of axes"),
        ('extends = "defualt"', "extends = 'defualt' is unknown"),
        ('extends = "default"', "needs the rules to extend; fix: pass base=default_rules()"),
        ('unknown = "ignore"', "unknown = 'ignore' is unknown"),
        ('indivisible = "pad"', "indivisible = 'pad' is unknown"),
        ('[patterns]\n"(" = ["embed"]', "pattern '(' is not a regular expression"),
        ('[patterns]\n"k" = ["emb ed"]', "pattern 'k': 'emb ed' is not a logical axis name"),
        ('rules = ["batch -> data", "batch => data"]', "rule 'batch => data' cannot be read here"),
    ],
)
def test_a_rules_file_with_a_mistake_names_file_and_mistake(text, says):
    with pytest.raises(ShardingError) as caught:
        Rules.from_toml(text, source="rules.toml")
    assert str(caught.value).startswith("rules.toml:")
    assert says in str(caught.value)


def test_a_file_may_extend_the_default_rules():
    rules = Rules.from_toml('extends = "default"\nrules = ["relpos -> none"]', base=default_rules())
    assert str(rules.rules[0]) == "relpos -> none"
    assert rules.rules[1:] == default_rules().rules
