"""How an option is declared, read and explained. Owns the sources (command line, environment, TOML) and their precedence.

An option is one dataclass field made by `tgi`, `ours` or `idle`: its name, type and default are the field's, the rest is here. This module
knows no option by name; `config.py` declares them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Origin = Literal["tgi", "forerun"]


class ConfigError(Exception):
    """A command line, environment or file that cannot be served. The message says what to change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """What a field's declaration says beyond name, type and default."""

    help: str
    origin: Origin
    idle: str = ""
    """why the option has no effect here; empty when it has one"""
    flag: bool = True
    """False: the environment and the file only, as in TGI"""
    names: tuple[str, ...] = ()
    """other names for the same thing, snake case; each is also an environment variable"""
    short: str = ""
    env: tuple[str, ...] = ()
    """further environment variables, after the one that follows from the name"""
    no_env: bool = False
    least: float | None = None
    most: float | None = None
    comma: bool = False
    """one value may hold several, separated by commas"""
    hidden: bool = False
    never_empty: bool = False
    """an empty environment variable is an error, not "not set": an empty key must not open a server"""


def _field(default: Any, declared: Declared, secret: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"declared": declared}, repr=not secret)


def tgi(default: Any, help: str, *, secret: bool = False, **more: Any) -> Any:
    """An option of TGI's launcher, router or environment that means the same here."""
    return _field(default, Declared(help, "tgi", **more), secret)


def ours(default: Any, help: str, *, secret: bool = False, **more: Any) -> Any:
    """An option TGI does not have. Its environment variable starts with FORERUN_."""
    return _field(default, Declared(help, "forerun", **more), secret)


def idle(default: Any, help: str, why: str, *, secret: bool = False, **more: Any) -> Any:
    """An option of TGI's that is accepted and does nothing; `why` is logged when it is given."""
    return _field(default, Declared(help, "tgi", idle=why, **more), secret)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option, resolved from its field."""

    section: str
    name: str
    default: Any
    kind: type
    """str, int, float or bool"""
    choices: tuple[str, ...]
    many: bool
    optional: bool
    secret: bool
    declared: Declared

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def switch(self) -> bool:
        """Takes no value on the command line: present means true (clap's rule for a plain bool)."""
        return self.kind is bool and not self.optional and self.default is False

    @property
    def flags(self) -> tuple[str, ...]:
        if not self.declared.flag:
            return ()
        long = tuple("--" + name.replace("_", "-") for name in (self.name, *self.declared.names))
        return (*long, self.declared.short) if self.declared.short else long

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables, strongest first."""
        prefix = "" if self.declared.origin == "tgi" else "FORERUN_"
        own = () if self.declared.no_env else tuple(prefix + name.upper() for name in (self.name, *self.declared.names))
        return own + self.declared.env

    @property
    def metavar(self) -> str:
        if self.switch:
            return ""
        if self.choices:
            return "|".join(self.choices)
        return {bool: "true|false", int: "N", float: "X", str: self.name.upper()}[self.kind]

    def value(self, raw: object, source: str) -> Any:
        """`raw` (text, or a TOML value) as this option's type. Raises ConfigError that names the source and what was expected."""
        if self.many:
            return tuple(self._one(part, source) for part in self._parts(raw))
        return self._one(raw, source)

    def _parts(self, raw: object) -> list[object]:
        parts = list(raw) if isinstance(raw, list | tuple) else [raw]
        if not self.declared.comma:
            return parts
        return [piece for part in parts for piece in (part.split(",") if isinstance(part, str) else [part])]

    def _one(self, raw: object, source: str) -> Any:
        try:
            found = _READ[self.kind](raw)
        except ValueError as wrong:
            raise ConfigError(f"invalid value {self._shown(raw)} for {source}: {wrong}") from None
        if self.choices and found not in self.choices:
            raise ConfigError(f"invalid value {self._shown(raw)} for {source}: choose one of {', '.join(self.choices)}")
        least, most = self.declared.least, self.declared.most
        if least is not None and found < least:
            raise ConfigError(f"invalid value {self._shown(raw)} for {source}: `{self.name}` must be >= {least:g}")
        if most is not None and found > most:
            raise ConfigError(f"invalid value {self._shown(raw)} for {source}: `{self.name}` must be <= {most:g}")
        return found

    def _shown(self, raw: object) -> str:
        return "(hidden)" if self.secret else f"'{raw}'"


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A value somebody gave, and where: "'--port'", "environment variable PORT", "file.toml: port"."""

    value: Any
    source: str


def _read_int(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]+", raw.strip()):
        return int(raw)
    raise ValueError("expected a whole number")


def _read_float(raw: object) -> float:
    if isinstance(raw, str | int | float) and not isinstance(raw, bool):
        try:
            found = float(raw)
        except ValueError:
            pass
        else:
            if found == found and abs(found) != float("inf"):
                return found
    raise ValueError("expected a number")


def _read_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in ("true", "1", "yes", "y", "on", "t"):
        return True
    if word in ("false", "0", "no", "n", "off", "f"):
        return False
    raise ValueError("expected true or false")


def _read_str(raw: object) -> str:
    if isinstance(raw, str) and raw:
        return raw
    raise ValueError("expected text" if not isinstance(raw, str) else "it is empty: give a value or leave it out")


_READ: dict[type, Any] = {int: _read_int, float: _read_float, bool: _read_bool, str: _read_str}


def options_of(section: str, cls: type) -> list[Option]:
    """The options a section's dataclass declares, in order."""
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint, optional, many = hints[field.name], False, False
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            hint, optional = next(arm for arm in typing.get_args(hint) if arm is not type(None)), True
        if typing.get_origin(hint) is tuple:
            hint, many = typing.get_args(hint)[0], True
        choices: tuple[str, ...] = ()
        if typing.get_origin(hint) is Literal:
            choices, hint = typing.get_args(hint), str
        found.append(Option(section, field.name, field.default, hint, choices, many, optional, not field.repr, field.metadata["declared"]))
    return found


def _unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "; see `forerun serve --help`"
    return ConfigError(f"unexpected {what} '{name}'{hint}")


def from_flags(argv: Sequence[str], options: Iterable[Option]) -> dict[str, Given]:
    """clap's grammar: `--name value`, `--name=value`, `-p 80`, `-p80`; plain booleans take no value; only lists may be repeated."""
    by_flag = {flag: option for option in options for flag in option.flags}
    raw: dict[str, list[str]] = {}
    spelled: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("-") and not word.startswith("--") and len(name) > 2:
            name, equals, value = word[:2], "=", word[2:].removeprefix("=")
        option = by_flag.get(name)
        if option is None:
            raise _unknown("argument", name, by_flag)
        if not option.switch and not equals:
            if not rest or (rest[0].startswith("-") and not re.fullmatch(r"-[0-9.]+", rest[0])):
                raise ConfigError(f"a value is required for '{name} <{option.metavar}>' but none was supplied")
            value = rest.pop(0)
        if option.name in raw and not option.many:
            both = {name, spelled[option.name]}
            if len(both) > 1:
                raise ConfigError(f"{' and '.join(sorted(both))} are two names of one option: give only '{option.flag}'")
            raise ConfigError(f"the argument '{name}' cannot be used multiple times")
        spelled[option.name] = name
        raw.setdefault(option.name, []).append(value if equals or not option.switch else "true")
    by_name = {option.name: option for option in by_flag.values()}
    return {
        name: Given(by_name[name].value(values if by_name[name].many else values[0], f"'{spelled[name]}'"), f"'{spelled[name]}'")
        for name, values in raw.items()
    }


def from_environment(environ: Mapping[str, str], options: Iterable[Option]) -> dict[str, Given]:
    """An empty variable counts as absent (compose files pass `NAME=` for "not set") unless the option forbids it. A value that an idle
    option cannot read is no error: Kubernetes sets `PROMETHEUS_PORT=tcp://…` for a service of that name."""
    found = {}
    for option in options:
        present = [v for v in option.variables if v in environ and (environ[v] or option.declared.never_empty)]
        if not present:
            continue
        twins = [v for v in present if v not in option.declared.env]
        if len(twins) > 1 and len({environ[v] for v in twins}) > 1:
            raise ConfigError(f"both {twins[0]} and {twins[1]} are set, two names of one option: keep only {option.variables[0]}")
        source = f"environment variable {present[0]}"
        try:
            found[option.name] = Given(option.value(environ[present[0]], source), source)
        except ConfigError:
            if not option.declared.idle:
                raise
            found[option.name] = Given(option.default, source)
    return found


def from_file(path: Path, options: Iterable[Option]) -> dict[str, Given]:
    """TOML: `port = 80` or `[serving] port = 80`; kebab or snake case."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as wrong:
        raise ConfigError(f"cannot read --config {path}: {wrong.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"--config {path} is not TOML: {wrong}") from None
    by_key = {(section, name): o for o in options for name in (o.name, *o.declared.names) for section in ("", o.section)}
    pairs: list[tuple[str, str, object]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += [(key.replace("-", "_"), inner.replace("-", "_"), item) for inner, item in value.items()]
        else:
            pairs.append(("", key.replace("-", "_"), value))
    found: dict[str, Given] = {}
    for section, name, value in pairs:
        option = by_key.get((section, name))
        shown = f"{section}.{name}" if section else name
        if option is None:
            raise _unknown(f"key in {path}", shown, [f"{s}.{n}" if s else n for s, n in by_key])
        if option.name in found:
            raise ConfigError(f"{path} gives `{option.name}` twice: keep one")
        source = f"{path}: {shown}"
        found[option.name] = Given(option.value(value, source), source)
    return found
