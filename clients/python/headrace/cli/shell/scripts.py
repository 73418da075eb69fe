"""The words that may be typed, as a script for each shell.

Owns the three languages. Each script finds the command that is being typed, word by word, and
offers its commands, its options or the values of the option before. It goes by the name of the
program and so serves every installation, also one that is typed with its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from headrace.cli.shell.command_tree import OptionWords, Place, Values

_BASH = """\
_headrace_completion() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}" place="" index
    # --name=value comes in three words.
    if [[ "$current" == "=" ]]; then
        current=""
    elif [[ "$previous" == "=" ]]; then
        previous="${{COMP_WORDS[COMP_CWORD - 2]}}"
    fi
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "$place ${{COMP_WORDS[index]}}" in
{path_cases}
        esac
    done
    local words="" files="" options=""
    case "$place" in
{place_cases}
    esac
    case "$place $previous" in
{value_cases}
        *) if [[ "$current" == -* ]]; then words="$options" files=""; fi ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    if [[ -n "$files" ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}}
complete -F _headrace_completion headrace
"""

_ZSH = """\
#compdef headrace
{header}
_headrace() {{
    local place="" word files="" previous="${{words[CURRENT - 1]}}"
    local -a commands options choices
    for word in "${{(@)words[2, CURRENT - 1]}}"; do
        case "$place $word" in
{path_cases}
        esac
    done
    if [[ "$PREFIX" == --*=* ]]; then
        previous="${{PREFIX%%=*}}"
        compset -P "*="
    fi
    case "$place $previous" in
{value_cases}
    esac
    case "$place" in
{place_cases}
    esac
    if [[ "$PREFIX" == -* ]]; then
        _describe -o option options
    elif (( $#commands )); then
        _describe command commands
    elif (( $#choices )); then
        compadd -a choices
    elif [[ -n "$files" ]]; then
        _files
    fi
}}
if [[ "$funcstack[1]" == "_headrace" ]]; then
    _headrace "$@"
else
    compdef _headrace headrace
fi
"""

_FISH = """\
function __headrace_place
    set -l place ""
    for word in (commandline -opc)[2..]
        switch "$place $word"
{path_cases}
        end
    end
    test "$place" = "$argv"
end
complete -c headrace -f
{lines}
"""


def bash(places: Sequence[Place], header: str) -> str:
    """Returns the script for bash 4.4 or newer."""
    script = _BASH.format(
        path_cases=_lines(12, (f"{_quoted(typed)}) place={_quoted(path)} ;;" for typed, path in _paths(places))),
        place_cases=_lines(8, map(_bash_place, places)),
        value_cases=_lines(8, _value_cases(places, _bash_values)),
    )
    return f"{header}\n{script}"


def _bash_place(place: Place) -> str:
    words = " ".join([name for name, _ in place.commands] or place.arguments.words)
    options = " ".join(name for option in place.options for name in option.names)
    files = "files=1 " if place.arguments.are_files else ""
    return f"{_quoted(place.path)}) {files}words={_quoted(words)} options={_quoted(options)} ;;"


def _bash_values(values: Values) -> str:
    return f"words={_quoted(' '.join(values.words))} files={_quoted('1' if values.are_files else '')}"


def zsh(places: Sequence[Place], header: str) -> str:
    """Returns the script for zsh, as a file of fpath or to be sourced after compinit."""
    return _ZSH.format(
        header=header,
        path_cases=_lines(12, (f"{_quoted(typed)}) place={_quoted(path)} ;;" for typed, path in _paths(places))),
        place_cases=_lines(8, map(_zsh_place, places)),
        value_cases=_lines(8, _value_cases(places, _zsh_values)),
    )


def _zsh_place(place: Place) -> str:
    options = [(name, option.text) for option in place.options for name in option.names]
    files = "files=1 " if place.arguments.are_files else ""
    choices = " ".join(map(_quoted, place.arguments.words))
    return (
        f"{_quoted(place.path)}) {files}choices=({choices}) commands=({_described(place.commands)}) "
        f"options=({_described(options)}) ;;"
    )


def _described(rows: Iterable[tuple[str, str]]) -> str:
    return " ".join(_quoted(f"{name}:{text}") for name, text in rows)


def _zsh_values(values: Values) -> str:
    if values.are_files:
        return "_files; return"
    return f"compadd -- {' '.join(map(_quoted, values.words))}; return" if values.words else "return 1"


def fish(places: Sequence[Place], header: str) -> str:
    """Returns the script for fish 3 or newer."""
    cases = [f"case {_fish(typed)}\n                set place {_fish(path)}" for typed, path in _paths(places)]
    lines = (line for place in places for line in _fish_lines(place))
    return f"{header}\n{_FISH.format(path_cases=_lines(12, cases), lines=_lines(0, lines))}"


def _fish_lines(place: Place) -> Iterator[str]:
    begin = f"complete -c headrace -n {_fish(f'__headrace_place {_fish(place.path)}')}"
    for name, text in place.commands:
        yield f"{begin} -a {name} -d {_fish(text)}"
    for option in place.options:
        yield f"{begin} {_fish_option(option)} -d {_fish(option.text)}"
    if place.arguments.words:
        yield f"{begin} -a {_fish(' '.join(place.arguments.words))}"
    if place.arguments.are_files:
        yield f"{begin} -F"


def _fish_option(option: OptionWords) -> str:
    names = []
    for name in option.names:
        bare = name.lstrip("-")
        kind = "-l" if name.startswith("--") else "-s" if len(bare) == 1 else "-o"
        names.append(f"{kind} {bare}")
    if option.values is None:
        return " ".join(names)
    if option.values.are_files:
        return f"{' '.join(names)} -r -F"
    words = f" -a {_fish(' '.join(option.values.words))}" if option.values.words else ""
    return f"{' '.join(names)} -x{words}"


SCRIPTS: Mapping[str, Callable[[Sequence[Place], str], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _paths(places: Iterable[Place]) -> Iterator[tuple[str, str]]:
    """What a place and a word behind it are written as, and the place that they lead to."""
    for place in places:
        if place.path:
            before, _, name = place.path.rpartition(" ")
            yield f"{before} {name}", place.path


def _value_cases(places: Iterable[Place], action: Callable[[Values], str]) -> Iterator[str]:
    """Cases of a place with an option that takes a value, one for each kind of value."""
    for place in places:
        kinds: dict[Values, list[str]] = {}
        for option in place.options:
            if option.values is not None:
                kinds.setdefault(option.values, []).extend(option.names)
        for values, names in kinds.items():
            yield f"{' | '.join(_quoted(f'{place.path} {name}') for name in names)}) {action(values)} ;;"


def _lines(indent: int, lines: Iterable[str]) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _quoted(text: str) -> str:
    """A word of bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(text: str) -> str:
    """A word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
