"""Command-line flags from dataclass fields, which give names, types, defaults, help and groups.

Values are written as `quire.foundation.config.values` reads them. Wrong arguments raise a ConfigError of one line.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import re
import shlex
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from quire.cli.settings_fields import (
    about,
    described,
    engine_config,
    help_word,
    hint,
    joined_keys,
    joined_lists,
    read_flags,
    settings_of,
    with_engine,
)
from quire.errors import ConfigError
from quire.foundation.config import BUILTIN_MODEL, Config, environment
from quire.foundation.config.values import is_readable, metavar, read_value, without_none
from quire.foundation.config.vllm_checks import check_vllm_setting, meant_value
from quire.foundation.config.vllm_compat import VLLM_ALIASES, VLLM_SETTINGS, VLLM_VALUES, VllmSetting

if TYPE_CHECKING:  # imported where there are flags to read: a tenth of a second with all that it takes along
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Options = TypeVar("Options")
_ALIKE = ("api_key", "served_model_name")
"""Flags whose first value may look like a model."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:\w+)?")
_LEVEL = re.compile(r"-O(\d|\{.*)")
_DATACLASS = re.compile(r"^[A-Za-z_]+: (?=--|[A-Z])")
"""What tyro puts in front of a ConfigError of a dataclass. Users only know flags."""


def registry() -> ConstructorRegistry:
    from tyro.constructors import ConstructorRegistry

    rules = ConstructorRegistry()
    rules.primitive_rule(_rule)
    return rules


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    from tyro.constructors import PrimitiveConstructorSpec

    kind = info.type
    if kind is bool or not is_readable(kind):
        return None  # bool: a flag without a value
    if kind == tuple[str, ...]:
        return PrimitiveConstructorSpec(
            nargs="*", metavar=metavar(kind), instance_from_str=lambda words: read_value(kind, words),
            is_instance=lambda value: True, str_from_instance=lambda value: list(value or ()),
        )  # fmt: skip
    return PrimitiveConstructorSpec(
        nargs=1, metavar=metavar(kind), instance_from_str=lambda words: read_value(kind, words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [json.dumps(value) if isinstance(value, dict) else str(value)],
    )  # fmt: skip


def parse_config(arguments: Sequence[str], program: str, description: str) -> Config:
    """Settings from flags. An argument without dashes is the model. Raises the errors of `parse`."""
    config, rest = _parsed(Config, arguments, program, description, vllm_flags=True)
    if not rest:
        if config.model.model == BUILTIN_MODEL and not _given(arguments, "--model"):
            _refuse_model_among_values(arguments, program)
        return config
    if len(rest) > 1 or rest[0].startswith("-") or _given(arguments, "--model"):
        raise _unknown(rest, Config, program, vllm_flags=True)
    return config.with_values(model=rest[0])


def _refuse_model_among_values(arguments: Sequence[str], program: str) -> None:
    """Refuse a model among a flag's values when no model is given: `--api-key KEY MODEL` would serve the built-in model
    with a second key. Raises ConfigError if the last value of a flag that takes several looks like a model."""
    several = {setting.name for setting in settings_of(Config) if setting.kind == tuple[str, ...]}
    flag, before = "", 0  # the last flag, and how many arguments stand before it
    values: list[str] = []
    for place, argument in enumerate(arguments):
        if argument.startswith("-"):
            flag, equals, value = argument.partition("=")
            values, before = [value] if equals else [], place
            continue
        name = flag.removeprefix("--").replace("-", "_")
        is_last = place + 1 == len(arguments) or arguments[place + 1].startswith("-")
        if name in several and is_last and len(values) >= (name in _ALIKE) and _looks_like_model(argument):
            shown = ["KEY"] if name == "api_key" else values
            right = shlex.join([argument, *arguments[:before], flag, *shown, *arguments[place + 1 :]])
            raise ConfigError(
                f"{argument} would be another value of {flag}, and no MODEL is given. Put it first: {program} {right}. "
                f"For the built-in model add --model {BUILTIN_MODEL}."
            )
        values.append(argument)


def _looks_like_model(text: str) -> bool:
    """Whether the text is a model on this machine, or has the form of a hub id."""
    return text == BUILTIN_MODEL or _HUB_ID.fullmatch(text) is not None or os.path.exists(text)


def parse_with_engine(
    options: type[Options], arguments: Sequence[str], program: str, description: str
) -> tuple[Options, Config]:
    """A command's own options, and the engine's settings without the server's. Raises the errors of `parse`."""
    both: Any = with_engine(options)
    parsed, rest = _parsed(both, arguments, program, description, vllm_flags=True)
    if rest:
        raise _unknown(rest, both, program, vllm_flags=True)
    return parsed.own, engine_config(parsed)


def parse(options: type[Options], arguments: Sequence[str], program: str, description: str) -> Options:
    """An instance of the dataclass `options` from its fields' flags.

    Raises:
        ConfigError: A flag is unknown or its value cannot be read.
        SystemExit: With code 0, after --help.
    """
    parsed, rest = _parsed(options, arguments, program, description, vllm_flags=False)
    if rest:
        raise _unknown(rest, options, program, vllm_flags=False)
    return parsed


def _parsed(
    options: type[Options], arguments: Sequence[str], program: str, description: str, *, vllm_flags: bool
) -> tuple[Options, list[str]]:
    """The options, from a settings file and then from the arguments, and the arguments that are no options."""
    if (word := help_word(arguments)) is not None:
        shown = described(options) if word == "all" else about(options, word)
        usage = _usage(options, program) if word == "all" or options is Config else program
        _tyro(shown, ["--help"], usage, f"{description}\n\n{hint(options)}")
    path, arguments = _without_config(arguments)
    default: Options | None = None
    if path is not None:
        flags = read_flags(path, _names(options, vllm_flags))
        try:
            default, _ = _from_flags(options, flags, program, None, vllm_flags)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", param=error.param) from error
    return _from_flags(options, arguments, program, default, vllm_flags)


def _usage(options: type, program: str) -> str:
    """The program of a usage line, with how it is given a model, if it is."""
    if options is Config:
        return f"{program} [MODEL]"
    settings = settings_of(options)
    has_flag = any(setting.name in ("model", "model_name") for setting in settings)
    is_behind = any("Positional" in str(setting.kind) for setting in settings)
    return f"{program} [--model MODEL]" if has_flag and not is_behind else program


def _from_flags(
    options: type[Options], arguments: Sequence[str], program: str, default: Options | None, vllm_flags: bool
) -> tuple[Options, list[str]]:
    arguments = _written_out(arguments, _names(options, vllm_flags))
    arguments = _without_vllm_flags(arguments) if vllm_flags else arguments
    arguments = joined_keys(options, arguments)
    flags = [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")]
    arguments = joined_lists(options, arguments) if len(set(flags)) < len(flags) else arguments
    arguments = _with_spelled_booleans(options, arguments)
    said = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):  # tyro asks stdout which boxes it can
            if options is Config:
                return _given_settings(arguments, program, default or Config())
            return _tyro(options, arguments, program, "", default)
    except SystemExit:
        said.seek(0)
        raise ConfigError(_first_paragraph(said.read())) from None


def _given_settings(arguments: Sequence[str], program: str, default: Any) -> tuple[Any, list[str]]:
    """`default` with the settings that are given. The parser only gets these: all of them take it a tenth of a second,
    for which a server's start is not to wait."""
    flags = {each.partition("=")[0][2:].replace("-", "_") for each in arguments if each.startswith("--")}
    given = [setting for setting in settings_of(Config) if flags & {setting.name, f"no_{setting.name}"}]
    if not given:
        return default, list(arguments)
    made = make_dataclass("Given", [(each.name, each.kind, each.default) for each in given])
    values, rest = _tyro(made, arguments, program, "")
    return default.with_values(**vars(values)), rest


def _tyro(
    options: Any, arguments: Sequence[str], program: str, description: str, default: Any = None
) -> tuple[Any, list[str]]:
    import tyro

    if environment.no_color():  # tyro does not check this itself
        tyro._experimental_options["ansi_codes"] = False
    return tyro.cli(
        options, args=list(arguments), prog=program, description=description,
        default=tyro.MISSING_NONPROP if default is None else default, return_unknown_args=True,
        registry=registry(), config=(tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands),
    )  # fmt: skip


def _without_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    path, kept = None, []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name != "--config":
            kept.append(argument)
            continue
        path = value if equals else next(rest, "")
        if not path:
            raise ConfigError("--config needs a file.", param="config")
    return path, kept


def _written_out(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Write out flags of which only the beginning is given, where one flag alone begins so: `--random-input` is read as
    `--random-input-len`, as argparse does, and a warning says so."""
    known = {f"--{no}{name.replace('_', '-')}" for name in names for no in ("", "no-")}
    written = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name, dot, key = flag.replace("_", "-").partition(".")
        if name.startswith("--") and len(name) > len("--x") and name not in known | {"--config", "--help"}:
            meant = [each for each in known if each.startswith(name)]
            if len(meant) == 1:
                print(f"quire: warning: {flag} is read as {meant[0]}", file=sys.stderr)
                argument = f"{meant[0]}{dot}{key}{equals}{value}"
        written.append(argument)
    return written


def _without_vllm_flags(arguments: Sequence[str]) -> list[str]:
    """Leave out vLLM's flags that have no effect, each with a warning, and write its values as Quire's. Raises
    ConfigError for a flag that asks for more."""
    kept: list[str] = []
    left = deque(arguments)
    while left:
        argument = left.popleft()
        flag, equals, text = argument.partition("=")
        if level := _LEVEL.fullmatch(argument):  # -O3
            flag, equals, text = "-O", "=", level[1]
        flag, _, key = flag.partition(".") if flag.startswith("-") else (flag, "", "")
        name = VLLM_ALIASES.get(flag) or (flag[2:].replace("-", "_") if flag.startswith("--") else "")
        negated = name.startswith("no_") and name[3:] in VLLM_SETTINGS
        name = name[3:] if negated else name
        if name in VLLM_VALUES:
            text = text if equals else left.popleft() if left else ""
            kept.append(f"{flag}={meant_value(name, text)}")
        elif name not in VLLM_SETTINGS:
            kept.append(
                f"--{name.replace('_', '-')}{argument.removeprefix(flag)}" if flag in VLLM_ALIASES else argument
            )
        else:
            value = _vllm_value(VLLM_SETTINGS[name], negated, text if equals else None, left)
            warning = check_vllm_setting(name, f"{key}={value}" if key else value)
            print(f"quire: warning: {warning}", file=sys.stderr)
    return kept


def _vllm_value(setting: VllmSetting, negated: bool, text: str | None, left: deque[str]) -> Any:
    """The value of a flag, behind its `=` or from the arguments that are left."""
    if setting.is_flag:
        return not negated and (text or "").lower() != "false"
    if text is not None or not setting.is_list:
        return text if text is not None else left.popleft() if left else ""
    values = []
    while left and not left[0].startswith("-"):
        values.append(left.popleft())
    return values


def _with_spelled_booleans(options: type, arguments: Sequence[str]) -> list[str]:
    """Turn `--x` and `--no-x` into `--x=true` and `--x=false` for settings that may also be None, and the reverse for
    settings that may not. Raises ConfigError if a flag has another value, or `--no-x` has one."""
    kinds = {s.name: s.kind for s in settings_of(options) if without_none(s.kind) is bool}
    spelled = []
    for argument in arguments:
        flag, equals, text = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        negated = name not in kinds and name.startswith("no_")
        kind = kinds.get(name.removeprefix("no_") if negated else name) if flag.startswith("--") else None
        if kind is None or (kind is bool and not equals):
            spelled.append(argument)
            continue
        if negated and equals:
            raise ConfigError(f"{flag} takes no value, got {text!r}.", param=name)
        try:
            value = read_value(kind, text) if equals else not negated
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}.", param=name) from None
        plain = f"--{flag[5:]}" if negated else flag
        if kind is bool:
            spelled.append(plain if value else f"--no-{plain[2:]}")
        else:
            spelled.append(f"{plain}={str(value).lower() if value is not None else value}")
    return spelled


def _first_paragraph(box: str) -> str:
    """The text of a tyro error box up to its first rule, on one line."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    rule = next((number for number, line in enumerate(lines) if line.startswith("─")), len(lines))
    text = " ".join(lines[:rule] or box.split()).removeprefix("Error parsing ")
    text = _DATACLASS.sub("", text)
    return f"{text.rstrip('.')}."


def _unknown(rest: Sequence[str], options: type, program: str, *, vllm_flags: bool) -> ConfigError:
    flag = next((argument for argument in rest if argument.startswith("-")), None)
    if flag is None:
        return ConfigError(f"'{rest[-1]}' was not expected: is it the value of a flag? See {program} --help.")
    flag = flag.partition("=")[0]
    own = _closest(flag, [*_names(options, vllm_flags=False), "config", "help"])
    close = own or (_closest(flag, list(VLLM_SETTINGS)) if vllm_flags else None)
    hint = f"Did you mean {close}?" if close else f"'{program} --help' lists them."
    return ConfigError(f"{flag} is not a flag of {program}. {hint}")


def _closest(flag: str, names: Sequence[str]) -> str | None:
    """The flag that was probably meant: one that is spelled alike, or else one that begins alike."""
    flag = flag.replace("_", "-")
    known = [f"--{name.replace('_', '-')}" for name in names]
    close = difflib.get_close_matches(flag, known, n=1)
    if not close and len(flag) > len("--x"):
        close = [name for name in known if name.startswith(flag) or flag.startswith(f"{name}-")]
    return close[0] if close else None


def _names(options: type, vllm_flags: bool) -> list[str]:
    own = [setting.name for setting in settings_of(options)]
    return [*own, *VLLM_SETTINGS] if vllm_flags else own


def _given(arguments: Sequence[str], flag: str) -> bool:
    return any(argument.partition("=")[0] == flag for argument in arguments)
