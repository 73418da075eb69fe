"""What a shell offers after `headrace completion`.

The shells themselves are asked, where they are.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from headrace.cli import main
from headrace.cli.shell.command_tree import places
from headrace.cli.shell.scripts import SCRIPTS

# What is typed, the word to complete last -> some of what is offered.
CASES = {
    ("headrace", "se"): {"serve", "service"},
    (".venv/bin/headrace", "admin", "lo"): {"load"},
    ("headrace", "serve", "--tens"): {"--tensor-parallel-size"},
    ("headrace", "serve", "--quantize", ""): {"off", "int8", "int4", "fp8", "nf4"},
    ("headrace", "generate", "--trace-detail", "a"): {"array"},
    ("headrace", "admin", "trace-detail", "s"): {"span"},
    ("headrace", "serve", "--tp", ""): set(),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Writes a shell's script, as the command prints it, to a file."""
    folder = tmp_path_factory.mktemp("scripts")

    def written(shell: str) -> pathlib.Path:
        path = folder / shell
        if not path.exists():
            result = CliRunner().invoke(main, ["completion", shell])
            assert result.exit_code == 0 and result.stderr == ""
            path.write_text(result.stdout)
        return path

    return written


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def output(*command: str, **environment: str) -> list[str]:
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=True)
    return ended.stdout.splitlines()


def bash_offers(path: pathlib.Path, *words: str) -> set[str]:
    typed = " ".join(f"'{word}'" for word in words)
    asked = f"source '{path}'; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _headrace_completion"
    # No program is in reach: what is offered costs no process.
    return set(output(shell("bash"), "--norc", "-c", f"{asked}; printf '%s\n' \"${{COMPREPLY[@]}}\"", PATH="")) - {""}


def fish_offers(path: pathlib.Path, *words: str) -> set[str]:
    asked = f"source '{path}'; complete -C '{' '.join(words)}'"
    return {line.split("\t")[0] for line in output(shell("fish"), "--no-config", "-c", asked, HOME=str(path.parent))}


@pytest.mark.parametrize("words", CASES)
@pytest.mark.parametrize("offers", [bash_offers, fish_offers])
def test_what_may_be_typed_is_offered(
    script: Callable[[str], pathlib.Path], offers: Callable[..., set[str]], words: tuple[str, ...]
) -> None:
    offered = offers(script(offers.__name__.removesuffix("_offers")), *words)
    assert CASES[words] <= offered and all(word.startswith(words[-1]) for word in offered)
    assert CASES[words] or not offered


def test_the_value_behind_an_equals_sign_is_offered(script: Callable[[str], pathlib.Path]) -> None:
    # bash takes --quantize=in for three words.
    assert bash_offers(script("bash"), "headrace", "serve", "--quantize", "=", "in") == {"int8", "int4"}
    assert fish_offers(script("fish"), "headrace", "serve", "--quantize=in") == {"--quantize=int8", "--quantize=int4"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_texts_of_commands_can_not_break_a_script(tmp_path: pathlib.Path, name: str) -> None:
    text = 'It\'s "$HOME" `x` \\ [y]: (z); {w} %s * ?'

    @click.group()
    def odd() -> None: ...

    @odd.command(help=text)
    @click.option("--odd", help=text)
    def command() -> None: ...

    path = tmp_path / "script"
    path.write_text(SCRIPTS[name](list(places(odd)), "# A script."))
    assert output(shell(name), "-n", str(path)) == []


def test_a_script_is_put_where_its_shell_looks_for_it(tmp_path: pathlib.Path) -> None:
    places_of = {
        "bash": "data/bash-completion/completions/headrace",
        "zsh": "data/zsh/site-functions/_headrace",
        "fish": "config/fish/completions/headrace.fish",
    }
    environment = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    for name, place in places_of.items():
        result = CliRunner().invoke(main, ["completion", name, "--install"], env=environment)
        assert result.exit_code == 0 and result.stdout == "" and str(tmp_path / place) in result.stderr
        assert "serve" in (tmp_path / place).read_text()
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        main, ["completion", "bash", "--install"], env={"XDG_DATA_HOME": str(tmp_path / "file")}
    )
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "Not a directory" in result.stderr
