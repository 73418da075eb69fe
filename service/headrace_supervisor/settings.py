"""Values from four places: defaults < TOML file < HEADRACE_* environment < flags.

Owns the merge and its errors. A setting is a field of a configuration class; its name in the file,
in the environment (HEADRACE_NAME) and on the command line (--name) follows from the field's, and so
do its help, range and default, so that nothing is written twice. What the settings mean is the
business of the classes; which of them a command takes is `config.py`'s.
"""

from __future__ import annotations

import difflib
import itertools
import os
import pathlib
import re
import stat
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Annotated, Any, NamedTuple

import pydantic
import pydantic_settings
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from headrace_health.address import overlap
from headrace_hub.resolve import marked_as_folder
from headrace_supervisor import foreign_names
from headrace_supervisor.value_rules import SIZE_RULE, rule_of

PREFIX = "HEADRACE_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
# Python makes no number of far more.
_MOST_DIGITS = 100
# Far more than all settings there are, with a comment each.
_MAX_FILE_BYTES = 1 << 20
# Linux takes no longer paths, and its file systems no longer names.
_MAX_PATH_BYTES = 4095
_MAX_NAME_BYTES = 255
# pydantic reads a size from the beginning of a text and leaves the rest: "1,5GiB" would be 1 byte.
_SIZE = re.compile(r"\s*(\d[\d_]*(\.\d+)?|\.\d+)\s*[A-Za-z]*\s*")


class ConfigError(Exception):
    """A setting that is unknown, missing or out of range.

    The message is one line and names the setting and where it came from.
    """


class Group(NamedTuple):
    """One configuration class as a command takes it.

    A title for --help, and the fields that the command sets itself.
    """

    title: str
    model: type[pydantic.BaseModel]
    hidden: frozenset[str] = frozenset()

    def fields(self) -> dict[str, FieldInfo]:
        """Returns the fields that are settings of the command."""
        return {name: field for name, field in self.model.model_fields.items() if name not in self.hidden}


def needed(field: str) -> str:
    """Returns the error for a setting without a value."""
    argument = "the argument MODEL, " if field == "model" else ""
    return f"{field} is needed: {argument}{flag_name(field)}, {PREFIX}{field.upper()} or a line in the --config file"


def flag_name(field: str) -> str:
    """Name of a field on the command line."""
    return "--" + field.replace("_", "-")


def merge(
    groups: tuple[Group, ...], flags: Mapping[str, Any], config: pathlib.Path | None, known: Collection[str]
) -> dict[str, Any]:
    """Validated values of all settings of a command, by field name.

    Args:
        groups: the command's settings. A name that stands in several groups is one setting.
        flags: what the command line gave, as text.
        config: the TOML file, or None for the one that HEADRACE_CONFIG names, if any.
        known: settings that other commands take from the environment; not an error there.

    Raises:
        ConfigError: an unknown key or variable (with the nearest known one), or a value that its
            field refuses.
    """
    fields = {name: field for group in reversed(groups) for name, field in group.fields().items()}
    path = config or _config_from_environment()
    table = _read_toml(path) if path else {}
    _refuse_unknown(f"{path}: ", table, fields)
    variables = [name for name in os.environ if name.startswith(PREFIX) and name != CONFIG_VARIABLE]
    _refuse_unknown("environment: ", variables, {*fields, *known}, PREFIX)
    for name in fields:
        if _is_garbled(value := flags.get(name, os.environ.get(PREFIX + name.upper()))):
            raise ConfigError(f"{_place(name, flags, table, path)}: must be text in UTF-8, not {value!a:.80}")
    try:
        values = _settings_class(fields, table)(**flags)
    except pydantic.ValidationError as error:
        raise ConfigError(_first_problem(error, flags, table, path)) from None
    except pydantic_settings.SettingsError as error:
        raise ConfigError(f"environment: {error}") from None
    return {name: getattr(values, name) for name in fields}


def read_file(group: Group, path: pathlib.Path) -> dict[str, Any]:
    """Settings of one group from a TOML file, not validated yet; none if there is no such file.

    Raises:
        ConfigError: it can't be read, or holds a key that is none of the group's settings.
    """
    if not path.exists():
        return {}
    if not path.is_file():
        raise ConfigError(f"{path}: is not a file")
    table = _read_toml(path)
    fields = group.fields()
    _refuse_unknown(f"{path}: ", table, fields)
    for name, value in table.items():
        if fields[name].annotation is pydantic.ByteSize and not _is_size(value):
            raise ConfigError(f"{path}: {name}: {SIZE_RULE}, not {str(value)[:80]!r}")
    return {name: foreign_names.our_word(name, value) for name, value in table.items()}


def check_table(group: Group, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns settings of one group that another kind of file holds, for a command elsewhere.

    Args:
        group: the settings that the table may have.
        table: the settings by name, as they were read.
        where: the file and the table in it, for people.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a value that its field refuses.
    """
    fields = group.fields()
    _refuse_unknown(f"{where}: ", table, fields)
    present = {name: field for name, field in fields.items() if name in table}
    try:
        values = _settings_class(present, {})(**table)
    except pydantic.ValidationError as error:
        raise ConfigError(_first_problem(error, {}, table, where)) from None
    return {name: getattr(values, name) for name in present}


def _config_from_environment() -> pathlib.Path | None:
    named = os.environ.get(CONFIG_VARIABLE)
    return pathlib.Path(named) if named else None


def _read_toml(path: pathlib.Path) -> dict[str, Any]:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: is not a regular file")
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: has more than {_MAX_FILE_BYTES} bytes")
        table = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is not TOML: lists or tables are nested too deeply") from None
    except ValueError:
        # Python makes no whole number of so many digits.
        raise ConfigError(f"{path}: is not TOML: a number has too many digits") from None
    for name in [name for name, value in table.items() if _is_garbled(value)]:
        # No path, address or name of the system's may hold it, and neither may an argument.
        raise ConfigError(f"{path}: {name}: must be text without the character NUL")
    for name in [name for name, value in table.items() if isinstance(value, dict)]:
        raise ConfigError(f"{path}: [{name}] begins a table; settings stand in the file as they are, without tables")
    return table


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file. To open a named pipe, which is then refused, never waits for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse_unknown(where: str, names: Collection[str], known: Collection[str], prefix: str = "") -> None:
    """Raises ConfigError for the first name that is none of the known ones behind the prefix."""
    for name in names:
        field = name.removeprefix(prefix)
        if prefix:
            field = field.lower()
        if field not in known:
            raise ConfigError(f"{where}unknown setting {name}{_instead(field, known, prefix)}")


def _instead(name: str, known: Collection[str], prefix: str) -> str:
    """What there is instead of an unknown setting, in our names, or else the nearest name."""
    ours = foreign_names.field_of(name)
    if ours is not None and ours in known:
        return f"; here it is {_as_typed(ours, prefix)}"
    if sentence := foreign_names.instead_of(name, {flag_name(field) for field in known}):
        return f": {sentence}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest known one is {_as_typed(near[0], prefix)}" if near else ""


def _as_typed(field: str, prefix: str) -> str:
    return prefix + field.upper() if prefix else field


def _settings_class(fields: Mapping[str, FieldInfo], table: Mapping[str, Any]) -> type[pydantic_settings.BaseSettings]:
    """A flat settings class of these fields.

    What it is called with goes before the environment, that before the table.
    """

    class Layered(pydantic_settings.BaseSettings):
        model_config = pydantic_settings.SettingsConfigDict(
            env_prefix=PREFIX, extra="forbid", enable_decoding=False, allow_inf_nan=False
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[pydantic_settings.BaseSettings],
            init_settings: pydantic_settings.PydanticBaseSettingsSource,
            env_settings: pydantic_settings.PydanticBaseSettingsSource,
            dotenv_settings: pydantic_settings.PydanticBaseSettingsSource,
            file_secret_settings: pydantic_settings.PydanticBaseSettingsSource,
        ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
            return (
                init_settings,
                env_settings,
                pydantic_settings.InitSettingsSource(settings_cls, init_kwargs=dict(table)),
            )

    definitions: dict[str, Any] = {name: (_annotation(name, field), field) for name, field in fields.items()}
    return pydantic.create_model("Settings", __base__=Layered, **definitions)


def _annotation(name: str, field: FieldInfo) -> Any:
    """The field's type, which also takes text.

    A tuple with commas, one of several numbers or words. pydantic reads all other types from text.
    """
    kind = typing.get_origin(field.annotation)
    if kind is tuple:
        if float in typing.get_args(field.annotation):
            return Annotated[field.annotation, pydantic.BeforeValidator(_numbers)]
        return Annotated[
            field.annotation,
            pydantic.BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
        ]
    if field.annotation is pydantic.ByteSize:
        return Annotated[field.annotation, pydantic.BeforeValidator(_size)]
    if field.annotation is pathlib.Path:
        return Annotated[field.annotation, pydantic.BeforeValidator(lambda value: marked_as_folder(_named(value)))]
    if pathlib.Path in typing.get_args(field.annotation):
        return Annotated[field.annotation, pydantic.BeforeValidator(_named)]
    if kind is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(field.annotation)}
        return Annotated[
            field.annotation,
            pydantic.BeforeValidator(lambda value: _chosen(name, choices, value)),
        ]
    return field.annotation


def _chosen(name: str, choices: Mapping[str, Any], value: Any) -> Any:
    """The choice that a text means, in our words or another server's."""
    return choices.get(foreign_names.our_word(name, value), value) if isinstance(value, str) else value


def _named(path: Any) -> Any:
    """Raises ValueError for what is no path: an empty one would be the current folder."""
    if path == "":
        raise ValueError("must be a path")
    if isinstance(path, str):
        encoded = os.fsencode(path)
        if len(encoded) > _MAX_PATH_BYTES or any(len(name) > _MAX_NAME_BYTES for name in encoded.split(b"/")):
            raise ValueError(
                f"must be a path of at most {_MAX_PATH_BYTES} bytes, and each name in it of at most {_MAX_NAME_BYTES}"
            )
    return path


def _is_garbled(value: Any) -> bool:
    """Whether a text, or one of several, can be handed to no process.

    An argument or variable with bytes that are no UTF-8 has surrogates in their place.
    """
    texts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(text, str) and re.search("[\0\ud800-\udfff]", text) for text in texts)


def _size(value: Any) -> Any:
    """Raises ValueError for a text that only begins like a size."""
    if not _is_size(value):
        raise ValueError(SIZE_RULE)
    return value


def _is_size(value: Any) -> bool:
    """Whether a text is a size as a whole. What is no text is left to pydantic."""
    return not isinstance(value, str) or _SIZE.fullmatch(value) is not None


def _numbers(value: Any) -> Any:
    """Numbers with commas between them, also where an option was repeated."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        return value
    return [number for text in texts for number in text.split(",")]


def _first_problem(
    error: pydantic.ValidationError,
    flags: Mapping[str, Any],
    table: Mapping[str, Any],
    path: pathlib.Path | str | None,
) -> str:
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "missing":
        return needed(name)
    shown = repr(str(problem["input"])[:80])
    return f"{_place(name, flags, table, path)}: {rule_of(problem)}, not {shown}{_nearest(problem)}"


def _nearest(problem: ErrorDetails) -> str:
    """The choice nearest to a value that is none of them; a range names its limit by itself."""
    if problem["type"] != "literal_error":
        return ""
    choices = re.findall(r"'([^']+)'|(\d+)", problem["ctx"]["expected"])
    words = [word or number for word, number in choices]
    text = str(problem["input"])
    if text.isdecimal() and len(text) < _MOST_DIGITS and all(word.isdecimal() for word in words):
        nearest = min(words, key=lambda word: abs(int(word) - int(text)))
    else:
        nearest = next(iter(difflib.get_close_matches(text, words, n=1)), "")
    return f" (nearest: {nearest})" if nearest else ""


def _place(name: str, flags: Mapping[str, Any], table: Mapping[str, Any], path: pathlib.Path | str | None) -> str:
    """Returns the source of the value that was used, for people."""
    if name in flags:
        return flag_name(name)
    if isinstance(path, str):
        return f"{path}: {name}"
    if PREFIX + name.upper() in os.environ:
        return PREFIX + name.upper()
    return f"{path}: {name}" if name in table else name


def names(groups: tuple[Group, ...]) -> Iterator[str]:
    """Names of all settings of these groups, each once."""
    return iter(dict.fromkeys(name for group in groups for name in group.fields()))


def check_addresses(**listened: AbstractSequence[str]) -> None:
    """Raises ConfigError if two of the addresses to listen at, by their settings, are the same."""
    named = [(name, address) for name, addresses in listened.items() for address in addresses]
    for (name, address), (other_name, other) in itertools.combinations(named, 2):
        if overlap(address, other):
            names = f"{name} and {other_name}" if name != other_name else name
            are = f"{address} is named twice" if address == other else f"{address} and {other} are the same"
            raise ConfigError(f"{names}: {are}; each needs an address of its own")


def contradiction(error: pydantic.ValidationError) -> ConfigError:
    """Returns what a class as a whole, or one of its checks of a field, has against values."""
    problem = error.errors(include_url=False)[0]
    field = f"{problem['loc'][0]}: " if problem["loc"] else ""
    return ConfigError(field + rule_of(problem))
