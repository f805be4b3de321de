"""Help answers at once, fits a screen and loads no JAX; completion comes out for three shells."""

import resource
import subprocess
import sys

import pytest

COMMANDS = ("explain", "train", "demo", "schedule")
HELP_SECONDS = 0.3
TRIES = 5


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda command: " ".join(command) or "-")
def test_help_is_at_most_60_lines(cli, command):
    result = cli(*command, "--help")
    assert result.status == 0
    assert result.out.startswith("Usage: shardlib")
    assert len(result.out.splitlines()) <= 60
    assert not result.err


def test_help_names_every_command_in_full(cli):
    out = cli("--help").out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert "..." not in out.replace("[ARGS]...", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(cli, command):
    assert f"Example: shardlib {command}" in " ".join(cli(command, "--help").out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_help(cli, command):
    assert cli(command, "-h") == cli(command, "--help")


def test_no_command_shows_the_help_and_is_a_usage_error(cli):
    result = cli()
    assert result.status == 2
    assert "Usage: shardlib" in result.err


def test_version(cli):
    result = cli("--version")
    assert (result.status, result.out.split()[0]) == (0, "shardlib")


def test_help_takes_at_most_0_3_seconds(process):
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(TRIES)) <= HELP_SECONDS  # processor time: the machine may be busy


def test_help_of_every_command_imports_no_jax():
    program = (
        "import sys\nfrom shardlib.cli import main\n"
        f"for name in {COMMANDS!r}:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit as end: assert not end.code\n"
        "print([name for name in ('jax', 'flax', 'optax', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(process, shell):
    done = process(_SHARDLIB_COMPLETE=f"source_{shell}")
    assert done.returncode == 0
    assert f"complete_{shell}" in done.stdout
    assert "shardlib" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("shardlib tr", "train"),
        ("shardlib train --dev", "--devices"),
        ("shardlib train --devices c", "cpu"),
        ("shardlib explain --ver", "--versus"),
    ],
)
def test_completion_offers(process, words, expected):
    done = process(_SHARDLIB_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert done.stdout.split() == [expected]
