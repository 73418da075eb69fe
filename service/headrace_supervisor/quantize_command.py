"""`headrace quantize` on the command line.

Flags become a request, refused here as far as no torch is needed; then a process does the work.

Owns the flags, which follow from the fields of `QuantizeConfig`. Everything else is
`headrace_quantize`'s.
"""

from __future__ import annotations

import os
import sys
import typing
from typing import Any

import click
import pydantic
from pydantic.fields import FieldInfo

from headrace.local_server.installed import require_worker
from headrace.local_server.process import LocalServerError
from headrace_backend.start_rules import unsuitable_device
from headrace_hub.errors import HubRefused
from headrace_hub.resolve import resolve
from headrace_quantize.checks import QuantizeRefused, check
from headrace_quantize.config import QuantizeConfig
from headrace_supervisor.value_rules import rule_of

# click keeps the lines of a paragraph that begins with \b.
_EXAMPLES = """\b
Examples:
  headrace quantize llama-8b llama-int4 --method gptq --calibration text.txt
  headrace quantize llama-8b llama-fp8 --method rtn --scheme fp8
"""
_ARGUMENTS = ("model_folder", "out_folder")


def _options(command: click.Command) -> click.Command:
    fields = QuantizeConfig.model_fields
    command.params += [_option(name, field) for name, field in fields.items() if name not in _ARGUMENTS]
    return command


def _option(name: str, field: FieldInfo) -> click.Option:
    flag = "--" + name.replace("_", "-")
    words = (field.description or "") + _default(field)
    kinds = _kinds(field)
    if kinds == {bool}:
        return click.Option([_FLAG_PAIRS.get(name, flag)], default=None, is_flag=True, help=words)
    multiple = typing.get_origin(field.annotation) is tuple
    metavar = "|".join(_choices(field)) or ("INTEGER" if int in kinds else "NUMBER" if float in kinds else "TEXT")
    return click.Option([flag, name], default=None, multiple=multiple, metavar=metavar, help=words)


_FLAG_PAIRS = {"symmetric": "--symmetric/--asymmetric", "clip": "--clip/--no-clip"}


def _kinds(field: FieldInfo) -> set[Any]:
    """The types that a field takes, without None."""
    return ({field.annotation} if isinstance(field.annotation, type) else set(typing.get_args(field.annotation))) - {
        type(None)
    }


def _choices(field: FieldInfo) -> list[str]:
    """The values of a field that takes some only."""
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    literal = next((kind for kind in kinds if typing.get_origin(kind) is typing.Literal), None)
    return [str(value) for value in typing.get_args(literal)]


def _default(field: FieldInfo) -> str:
    shown = field.default not in (None, (), False) and not field.is_required()
    return f" [default: {field.default}]" if shown else ""


@_options
@click.command(context_settings={"help_option_names": ["--help", "-h"]}, epilog=_EXAMPLES)
@click.argument("model_folder")
@click.argument("out_folder")
def quantize(model_folder: str, out_folder: str, **flags: Any) -> None:
    """Writes a model in fewer bits.

    MODEL_FOLDER, or ORG/NAME of a hub, in bf16, fp16 or fp32 becomes OUT_FOLDER in
    compressed-tensors, which transformers reads too.

    Layer by layer, so that a large model needs the memory of one of its layers. A run that was
    killed goes on with --resume and ends with the same bytes.
    """
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    try:
        require_worker()
        source = str(resolve(model_folder).path)
        config = request({"model_folder": source, "out_folder": out_folder, **given})
        check(config)
        check_device(config)
    except (QuantizeRefused, HubRefused, LocalServerError) as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(2)
    _become(config)


def request(values: dict[str, Any]) -> QuantizeConfig:
    """Returns the request that the command's flags make.

    Raises:
        QuantizeRefused: A value is none that its flag takes, or two do not go together; the message
            names the flag.
    """
    try:
        return QuantizeConfig.model_validate({name: _parsed(name, value) for name, value in values.items()})
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:
            raise QuantizeRefused(rule_of(problem)) from None
        flag = "--" + str(problem["loc"][0]).replace("_", "-")
        choices = _choices(QuantizeConfig.model_fields[str(problem["loc"][0])])
        rule = f"must be one of {', '.join(choices)}" if choices else rule_of(problem)
        raise QuantizeRefused(f"{flag}: {rule}, is {problem['input']}") from None


def check_device(config: QuantizeConfig) -> None:
    """Checks that this machine may have the device, as far as no torch is needed.

    Raises:
        QuantizeRefused: It has none; the message names the flag.
    """
    reason = unsuitable_device(config.device)
    if reason is not None:
        raise QuantizeRefused(f"--{reason}")


def _parsed(name: str, value: Any) -> Any:
    """Text as a number where the field takes numbers among other values."""
    choices = _choices(QuantizeConfig.model_fields[name])
    is_number = isinstance(value, str) and value.isdecimal() and value in choices
    return int(value) if is_number else value


def _become(config: QuantizeConfig) -> typing.NoReturn:
    """Replaces this process by the one that quantizes.

    It reads the request from an anonymous file.
    """
    descriptor = os.memfd_create("headrace-quantize", 0)
    os.write(descriptor, config.model_dump_json(exclude_unset=True).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    arguments = ["--config-json", f"/proc/self/fd/{descriptor}"]
    os.execv(sys.executable, [sys.executable, "-m", "headrace_quantize", *arguments])
