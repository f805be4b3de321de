"""Every mistake on the command line: one message of at most ten lines that says where, what, why and the fix."""

import contextlib
import io

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlib.cli import main

TINY = "shardlib.examples.tiny:tiny"
EXPLAIN = ("explain", TINY, "--mesh", "data=2")
TRAIN = ("train", TINY, "--mesh", "data=2", "--steps", "2")

USER = """
import flax.linen as nn
import jax.numpy as jnp
from shardlib import ArraySpec
from shardlib.examples.tiny import Tiny, tiny

number = 3
module, good_loss, spec = tiny()
def raises(): raise RuntimeError("the disk is made of cheese")
def takes(size): return tiny()
def returns_module(): return Tiny()
def returns_two(): return 1, 2
def returns_nothing(): pass
def class_for_module(): return Tiny, good_loss, spec
def no_module(): return 5, good_loss, spec
def no_loss(): return module, 7, spec
def no_spec(): return module, good_loss, {}
def vector_loss():
    return module, lambda params, batch, rng: module.apply({"params": params}, batch["inputs"]).sum(-1), spec
def none_loss(): return module, lambda params, batch, rng: None, spec
def short_loss(): return module, lambda params, batch: 0.0, spec
def broken_loss():
    def loss(params, batch, rng):
        return batch["labels"].sum()
    return module, loss, spec
class Broken(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(4)(undefined)
def broken_module(): return Broken(), good_loss, spec
def exits(): raise SystemExit(0)
def prints():
    print("some words")
    return tiny()
def floats():
    entry = ArraySpec(shape=(16, 128), dtype="float32", axes=("batch", "length"))
    return module, good_loss, {"inputs": entry}
class Bare(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(256)(nn.Embed(256, 32)(inputs))
def bare():
    model = Bare()
    return model, lambda params, batch, rng: model.apply({"params": params}, batch["inputs"]).mean(), spec
"""


def complain(cli, *arguments: str, status: int = 2) -> str:
    result = cli(*arguments)
    assert result.status == status, result
    assert result.out == ""
    lines = result.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) <= 10
    assert "Traceback" not in result.err
    return result.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("explan",), ["no such command 'explan'", "Did you mean 'explain'"]),
        (("explain",), ["missing argument 'MODEL'", "usage: shardlib explain --mesh MESH [OPTIONS] MODEL"]),
        (("explain", TINY), ["no mesh was named", "fix: --mesh data=2,tensor=4, or --plan FILE"]),
        (("explain", TINY, "--mesh"), ["'--mesh' requires an argument", "fix: --mesh VALUE"]),
        ((*EXPLAIN, "--mehs", "x"), ["no such option: --mehs (did you mean '--mesh'?)"]),
        ((*EXPLAIN, "extra"), ["unexpected extra argument", "(extra)"]),
        (("train", TINY, "--mesh", "data=2"), ["missing option '--steps'"]),
        ((*TRAIN, "--devices", "gpu"), ["--devices", "'gpu' is not one of 'auto', 'real', 'cpu'"]),
        ((*EXPLAIN, "--batch", "x"), ["--batch x: this is not a whole number", "fix: --batch 16"]),
        ((*EXPLAIN, "--batch", "0"), ["--batch 0: this is not from 1 to", "fix: --batch 16"]),
        ((*EXPLAIN, "--length", "9" * 99), ["--length 999", "this is not from 1 to"]),
        ((*TRAIN[:-1], "0"), ["--steps 0: this is not from 1 to", "fix: --steps 100"]),
        ((*TRAIN, "--seed", "-1"), ["--seed -1: this is not from 0 to", "fix: --seed 0"]),
        ((*TRAIN, "--lr", "nan"), ["--lr nan: this is not a finite number", "fix: --lr 0.001"]),
        ((*TRAIN, "--lr=-1"), ["--lr -1: this is not a finite number of at least 0"]),
        ((*TRAIN, "--lr", "fast"), ["--lr fast: this is not a number"]),
        (("demo", "--steps", "1"), ["--steps 1: this is not from 2 to", "fix: --steps 60"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_options(cli, arguments, parts):
    message = complain(cli, *arguments)
    assert all(part in message for part in parts), message
    assert "fix: " in message


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("", ["the mesh has no axes"]),
        ("data", ["axis 'data' has no size\n  data\n      ^\n", 'fix: write "data=2"']),
        ("data=two", ["'two' is not a size", "\n  data=two\n       ^\n"]),
        ("data=2;tensor=4", ["\n  data=2;tensor=4\n        ^\n"]),
        ("data=2,,tensor=2", ["an axis is missing", "\n         ^\n"]),
        ("data=2,data=2", ["axis 'data' appears twice", "^^^^"]),
        ("data=0", ["size 0 of axis 'data' is not positive"]),
        ("tensor=99999999", ["needs 99999999 devices, above the limit"]),
        ("datta=2", ["no rule uses the axis 'datta' (did you mean 'data'?)", "2 devices would do the same work"]),
        ("data=2,stage=2", ["no layers to stage", "no loop at all", "layer_boundary(x)"]),
        ("data=3", ["'batch': size 16 not divisible by data=3", "fix: --batch 15"]),
    ],
)
def test_mesh(cli, mesh, parts):
    for arguments in (("explain", TINY, "--mesh", mesh), ("train", TINY, "--mesh", mesh, "--steps", "2")):
        message = complain(cli, *arguments)
        assert all(part in message for part in parts), message


def test_inferred_size_needs_devices(cli):
    assert "-1 needs devices to count" in complain(cli, "explain", TINY, "--mesh", "data=-1")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mine", ["'mine' is not an import string, module:name", 'fix: write "module:name"']),
        ("models.gpt.small", ['fix: write "models.gpt:small"']),
        ("./mine.py:raises", ["is not the name of a module", 'fix: write "mine:raises"']),
        ("nothing:x", ["no module 'nothing' in the current folder or installed"]),
        ("shardlib.exampels:x", ["no module 'shardlib.exampels'", "did you mean 'shardlib.examples'?"]),
        ("mime:raises", ["did you mean 'mine'?"]),
        ("mine:rises", ["mine has no 'rises' (did you mean 'raises'?)"]),
        ("mine:number", ["'mine:number' is an int, not a function"]),
        ("mine:raises", ["failed at mine.py:9, in raises", "RuntimeError: the disk is made of cheese"]),
        ("mine:takes", ["cannot be called without arguments", "'size'"]),
        ("mine:returns_module", ["returned a Tiny, not (module, loss, batch_spec)"]),
        ("mine:returns_two", ["returned a tuple of 2"]),
        ("mine:returns_nothing", ["returned None"]),
        ("mine:class_for_module", ["returned the class Tiny, not a module", "fix: return Tiny(...)"]),
        ("mine:no_module", ["first value is an int, not a Flax model"]),
        ("mine:no_loss", ["second value is an int, not a loss"]),
        ("mine:no_spec", ["must be made of ArraySpec"]),
        ("mine:vector_loss", ["the loss has shape [16, 128], not a scalar", "fix: return Loss("]),
        ("mine:none_loss", ["the loss is a NoneType, not a scalar"]),
        ("mine:short_loss", ["cannot be called as loss(params, batch, rng)"]),
        ("mine:broken_loss", ["failed at mine.py:24, in loss", "KeyError: 'labels'", "SHARDLIB_TRACEBACK=1"]),
        ("mine:broken_module", ["in __call__", "NameError: name 'undefined' is not defined"]),
        ("mine:exits", ["called sys.exit(0)"]),
    ],
)
def test_model(cli, user_file, name, parts):
    user_file("mine", USER)
    message = complain(cli, "explain", name, "--mesh", "data=2")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("body", "status", "parts"),
    [
        ("x = = 3", 2, ["importing 'broken' failed at broken.py:1", "SyntaxError"]),
        ("1 / 0", 2, ["failed at broken.py:1", "ZeroDivisionError: division by zero"]),
        ("import sys; sys.exit(0)", 2, ["importing 'broken' called sys.exit(0)"]),
        ("import no_such_package.inner", 3, ["imports 'no_such_package', which is not", "pip install no_such_package"]),
        ("from shardlib.examples.tiny import tyni", 2, ["cannot import name 'tyni'"]),
    ],
)
def test_broken_user_file(cli, user_file, body, status, parts):
    user_file("broken", body)
    message = complain(cli, "explain", "broken:model", "--mesh", "data=2", status=status)
    assert all(part in message for part in parts), message


def test_what_the_model_prints_is_not_the_result(cli, user_file):
    user_file("mine", USER)
    result = cli("explain", "mine:prints", "--mesh", "data=2", "--json")
    assert result.out.startswith("{")
    assert result.err == "some words\n"


def test_traceback_on_demand(cli, user_file, monkeypatch):
    user_file("mine", USER)
    monkeypatch.setenv("SHARDLIB_TRACEBACK", "1")
    result = cli("explain", "mine:broken_loss", "--mesh", "data=2")
    assert result.status == 2
    assert "Traceback" in result.err
    assert 'return batch["labels"].sum()' in result.err


def test_our_own_bug_keeps_its_traceback(cli, monkeypatch):
    monkeypatch.setattr("shardlib.cli.inputs.read_rules", lambda path: 1 / 0)
    result = cli(*EXPLAIN)
    assert result.status == 70
    assert "ZeroDivisionError" in result.err
    assert "this is a bug in shardlib; please report" in result.err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('rules = ["batch -> dat"]', ["'dat' is no axis of mesh", "did you mean 'data'?"]),
        ('rules = ["embed -> data"]', ["no rule names", 'fix: start the rules file with extends = "default"']),
        ('ruels = ["batch -> data"]', ["--rules r.toml", "unknown key 'ruels' (did you mean 'rules'?)"]),
        ('rules = ["batch => data"]', ["\n  batch => data\n        ^\n"]),
        ('rules = ["mlp -> tensor+tensor"]', ["uses mesh axis 'tensor' twice", 'write "mlp -> tensor"']),
        ("rules = [", ["--rules r.toml: not a TOML document"]),
        (b"\xff\xfe", ["--rules r.toml: cannot be read: not UTF-8 text"]),
    ],
)
def test_rules_file(cli, tmp_path, text, parts):
    (tmp_path / "r.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    message = complain(cli, *EXPLAIN, "--rules", "r.toml")
    assert all(part in message for part in parts), message


def test_rules_file_missing_or_a_folder(cli, tmp_path):
    (tmp_path / "typo.toml").write_text("")
    (tmp_path / "folder").mkdir()
    assert "no such file (did you mean 'typo.toml'?)" in complain(cli, *EXPLAIN, "--rules", "tpyo.toml")
    assert "cannot be read: Is a directory" in complain(cli, *EXPLAIN, "--rules", "folder")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("adamm", ["optax has no 'adamm' (did you mean 'adam'?)"]),
        ("optax:l2_loss", ["not an optax optimizer", "fix: name a function"]),
        ("math:pi", ["is not a function"]),
        ("os:getcwd", ["cannot be built from a learning rate"]),
    ],
)
def test_optimizer(cli, name, parts):
    message = complain(cli, *EXPLAIN, "--optimizer", name)
    assert all(part in message for part in parts), message


def test_batch_that_does_not_divide(cli):
    assert "fix: --batch 8" in complain(cli, *EXPLAIN, "--batch", "7")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("missing.txt", ["missing.txt: no such file or folder"]),
        ("empty.txt", ["empty.txt: the file is empty"]),
        ("folder", ["folder: no text file in this folder"]),
        ("short.txt", ["has 6 bytes, fewer than the 129", "length of at most 5"]),
        ("/dev/zero", ["/dev/zero: not a regular file"]),
    ],
)
def test_data(cli, tmp_path, monkeypatch, name, parts):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("hello\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("meshes.devices.find", lambda *_, **__: pytest.fail("devices were touched"))
    message = complain(cli, *TRAIN, "--data", name)
    assert all(part in message for part in parts), message


def test_devices(cli):
    message = complain(cli, *TRAIN, "--devices", "real")
    assert "no accelerator: JAX found only the CPU" in message
    assert "use --devices cpu to emulate" in message
    message = complain(cli, "train", TINY, "--mesh", "data=16", "--steps", "1", "--devices", "cpu")
    assert "needs 16 devices and there are 8" in message
    message = complain(cli, "train", TINY, "--mesh", "data=4096", "--batch", "4096", "--steps", "1", "--devices", "cpu")
    assert "at most 1024 can be emulated" in message


def test_models_that_cannot_be_fed_bytes(cli, user_file):
    user_file("mine", USER)
    message = complain(cli, "train", "mine:floats", "--mesh", "data=2", "--steps", "1")
    assert "the batch spec has inputs float32['batch', 'length']" in message
    message = complain(cli, "train", "mine:bare", "--mesh", "data=2", "--steps", "1")
    assert "no parameter of Bare has logical axes" in message
    assert "shardlib explain MODEL" in message


FUZZ_TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "-1", "0", "7", "1e9", "nan", "data=2", "tensor=4,data=2", "data=", "=", "--", "-", "\0", "é" * 9]
    ),
)
FUZZ_OPTIONS = st.sampled_from(
    [
        "--mesh",
        "--versus",
        "--rules",
        "--optimizer",
        "--batch",
        "--length",
        "--json",
        "--json-schema",
        "-h",
        "--bach",
        "-x",
    ]
)
FUZZ_MODEL = st.one_of(
    st.just(TINY),
    st.sampled_from(["shardlib:x", "os:getcwd", "a.b:c", "x:y:z", ":", "shardlib.examples.tiny:VOCAB"]),
    FUZZ_TEXT,
)
LINES = st.tuples(
    FUZZ_MODEL, FUZZ_TEXT, st.lists(st.one_of(st.tuples(FUZZ_OPTIONS, FUZZ_TEXT), st.tuples(FUZZ_OPTIONS)), max_size=4)
)


def check_line(line) -> None:
    model, mesh, options = line
    arguments = ["explain", model, "--mesh", mesh, *(part for option in options for part in option)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            assert ended.code in (None, 0, 1, 2, 3), err.getvalue()
            assert bool(ended.code) == err.getvalue().startswith("error: ")
    assert "Traceback" not in err.getvalue()
    assert len(err.getvalue().splitlines()) <= 10


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=300, deadline=2000, suppress_health_check=CHECKS, derandomize=True)
@given(LINES)
def test_any_command_line(line):
    check_line(line)


@pytest.mark.exhaustive
@settings(max_examples=10_000, deadline=2000, suppress_health_check=CHECKS)
@given(LINES)
def test_any_command_line_10_000(line):
    check_line(line)
