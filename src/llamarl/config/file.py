"""Reads YAML and `key=value` overrides into a Config, and writes it back. Every mistake becomes a one-line error."""

from __future__ import annotations

import difflib
import functools
import math
import re
import reprlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Meta

from llamarl.config import Config, Section
from llamarl.config.in_vain import refuse_settings_in_vain
from llamarl.config.other_names import NO_SETTINGS, OTHER_NAMES
from llamarl.config.renamed import new_name, with_new_names
from llamarl.errors import ConfigError

# A section given as a plain word sets its kind: `engine: inline` means `engine: {kind: inline}`.
_SHORTHAND_KEY = "kind"
_DEEPEST = 8  # sections inside sections, of any library


class _Loader(yaml.SafeLoader):
    """YAML loader with the numbers of YAML 1.2 (`1e-5` is a number) that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"'{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes every string that YAML's rules or ours would read back as another type."""


# YAML 1.1 reads 1e-5 as a string, 010 as 8 and 1:30 as 90. Here the first is a number and the others are strings.
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"^([-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _NUMBERS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
    _Dumper.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


COMMAND_LINE = "command line"


def load_config(path: Path | None = None, overrides: Sequence[str] = (), *, recorded: Config | None = None) -> Config:
    """Read the settings of a job: overrides take precedence over the file, and the file over the defaults. Settings that the
    job would not read are refused; a run that goes on may keep those that it was `recorded` with."""

    def settled(raw: Mapping[str, Any]) -> Config:
        config = parse_config(raw)
        refuse_settings_in_vain(config, recorded)
        return config

    return _read(path, overrides, settled)


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, but settings that the job would not read are let pass: an earlier release may have recorded them."""
    return _read(path, overrides, parse_config)


def _read(path: Path | None, overrides: Sequence[str], settled: Callable[[Mapping[str, Any]], Config]) -> Config:
    given = [*overrides]
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in given):
        raise ConfigError('overrides: must be a list of texts KEY=VALUE, such as ["trainer.lr=1e-4"]')
    written = read_settings(path) if path else {}
    raw = with_new_names(written)
    for override in given:
        _apply_override(raw, override)
    try:
        return settled(raw)
    except ConfigError as error:
        overridden = [override.partition("=")[0] for override in given]
        raise ConfigError(f"{_to_blame(error, path, lambda: settled(written), overridden)}{error}") from None


def _to_blame(error: ConfigError, path: Path | None, settle_file: Callable[[], Config], overridden: list[str]) -> str:
    """Source of an error, as a prefix of its message: the command line if the key is set there or if the file alone is
    valid; otherwise the file."""
    wrong = str(error).partition(":")[0]
    for key in overridden:
        if wrong == key or wrong.startswith((f"{key}.", f"{key}[")):
            return f"{COMMAND_LINE}: "
    try:
        settle_file()
    except ConfigError as alone:
        return f"{path}: " if str(alone) == str(error) else f"{COMMAND_LINE}: "
    return f"{COMMAND_LINE}: "


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Check settings and convert them to a Config. Raises ConfigError."""
    try:
        checked = _check(with_new_names(raw), Config, prefix="")
        return msgspec.convert(checked, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from None


def check_config(config: Config) -> Config:
    """The same settings, checked as if read from a file. Constructors alone do not check limits."""
    if not isinstance(config, Config | Mapping):
        raise ConfigError(f"config: must be a llamarl.Config, is a {type(config).__name__}; Job.load reads a file")
    try:
        return parse_config(msgspec.to_builtins(config))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"config: {error}") from None


def config_to_yaml(config: Config) -> str:
    """The settings as YAML, in ASCII: some Unicode line breaks would not survive a round trip."""
    return yaml.dump(msgspec.to_builtins(config), Dumper=_Dumper, sort_keys=False)


def describe(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of every setting, in the order of the fields."""
    hints, defaults = typing.get_type_hints(section, include_extras=True), section()
    for field in msgspec.structs.fields(section):
        hint, key = hints[field.name], prefix + field.name
        if _is_section(hint):
            yield from describe(hint, prefix=f"{key}.")
        else:
            default = yaml.safe_dump(msgspec.to_builtins(getattr(defaults, field.name)), default_flow_style=True)
            yield key, default.split("\n...")[0].strip(), _meaning(hint)


def _meaning(hint: Any) -> str:
    plain, *annotations = typing.get_args(hint)
    description = next(a.description for a in annotations if isinstance(a, Meta) and a.description)
    choices = typing.get_args(plain) if typing.get_origin(plain) is typing.Literal else ()
    return f"{description} ({' | '.join(choices)})" if len(choices) > 1 else description


def read_settings(path: Path) -> dict[str, Any]:
    """The content of a YAML file, unchecked."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if str(path) in _known_keys() or str(path) in _hints(Config):
            raise ConfigError(
                f"{COMMAND_LINE}: {path}: a setting is written with its value, such as {path}=..."
            ) from None
        raise ConfigError(f"{path}: no such file; `llamarl config > job.yaml` writes one to start from") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8 text") from None
    raw = _parse_yaml(text, str(path))
    if raw is None or raw == {}:
        raise ConfigError(f"{path}: holds no settings; `llamarl config > job.yaml` writes all of them to start from")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {_name(raw)}")
    return raw


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML does not wrap the errors of its constructors: `!!bool maybe` raises a KeyError.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{source}: not valid YAML: {reason}") from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{COMMAND_LINE}: '{override}': overrides are written key=value, such as trainer.lr=1e-4")
    *sections, last = new_name(key).split(".")
    node = raw
    for name in sections:
        child = node.get(name)
        if child is not None and not isinstance(child, dict):
            if f"{name}.{_SHORTHAND_KEY}" not in _known_keys():
                return  # of the file, which is wrong without it
            child = {_SHORTHAND_KEY: child}
        node[name] = node = dict(child or {})
    value = _parse_yaml(text, f"{COMMAND_LINE}: '{override[:60]}'")
    replaced = node.get(last)
    if isinstance(replaced, dict) and not isinstance(value, dict):
        value = {**replaced, _SHORTHAND_KEY: value}  # `engine=inline` keeps the section's other keys
    node[last] = value


def _check(raw: dict[str, Any], section: type[Section], prefix: str) -> dict[str, Any]:
    """Refuse unknown keys and non-finite numbers; expand shorthands."""
    hints = _hints(section)
    checked = {}
    for name, value in raw.items():
        key, hint = prefix + name, hints.get(name)
        if hint is None:
            raise ConfigError(_unknown(key, value))
        if _is_section(hint):
            checked[name] = _check(_as_section(key, value, hint), hint, prefix=f"{key}.")
            continue
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{key}: must be a finite number, got {number}")
        checked[name] = _on_or_off(value, hint)
    return checked


def _on_or_off(value: Any, hint: Any) -> Any:
    """YAML reads the words on and off as true and false; here they are words again, for settings that know them."""
    known = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return ("on" if value else "off") if isinstance(value, bool) and "on" in known else value


def _as_section(key: str, value: Any, section: type[Section]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    if _SHORTHAND_KEY not in _hints(section):
        first = f"{key}.{next(iter(_hints(section)))}"
        raise ConfigError(f"{key}: is a section with keys of its own, got {_name(value)}; write {first} and so on")
    return {_SHORTHAND_KEY: value}


def setting_named(name: str) -> str:
    """The key with this name, the only key that ends in it (of the trainer's and the critic's, the trainer's), or our key for
    another library's name; else ""."""
    ending = [key for key in _known_keys() if name in (key, key.rpartition(".")[2])]
    if {key.partition(".")[0] for key in ending} == {"critic", "trainer"}:
        return f"trainer.{name}"
    return ending[0] if len(ending) == 1 else OTHER_NAMES.get(_spelled(name.rpartition(".")[2]), "")


def _spelled(name: str) -> str:
    """A name of another library as `OTHER_NAMES` has it, with or without lines between its words."""
    plain = name.lower().replace("-", "_")
    joined = plain.replace("_", "")
    return next((known for known in (*OTHER_NAMES, *NO_SETTINGS) if known.replace("_", "") == joined), plain)


def _unknown(key: str, value: Any) -> str:
    """The error of an unknown key. Of a whole section of another library, its first setting is told."""
    for _ in range(_DEEPEST):  # YAML can make a section that holds itself
        if not isinstance(value, dict) or not value:
            break
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    if key in _known_keys():  # and was not found in its section
        *sections, last = key.split(".")
        nested = functools.reduce(lambda inside, name: f"{name}: {{{inside}}}", reversed(sections), f"{last}: ...")
        return f"{key}: in a file, keys stand inside their section: {nested}"
    return f"{key}: unknown key{_nearest(key)}"


def _nearest(key: str) -> str:
    """A hint at the intended key: the same name in another section or library, or else a similar spelling."""
    section, _, name = key.rpartition(".")
    if (told := NO_SETTINGS.get(_spelled(name))) and not setting_named(name):
        return f"; {told}"
    if f"{section.partition('.')[0]}.{name}" in _known_keys():
        return f"; did you mean '{section.partition('.')[0]}.{name}'?"
    siblings = {full.rpartition(".")[2]: full for full in _known_keys() if full.rpartition(".")[0] == section}
    found = [
        setting_named(name),
        *(siblings[near] for near in difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)),
    ]
    if not any(found):
        found = difflib.get_close_matches(key, [*_known_keys(), *_hints(Config)], n=1, cutoff=0.7)
    named = " or ".join(f"'{near}'" for near in dict.fromkeys(filter(None, found)))
    return f"; did you mean {named}?" if named else "; `llamarl config` lists all keys"


def _explain(message: str, raw: Mapping[str, Any]) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.schedule.updates`" into "schedule.updates: expected int, ..."."""
    reason, found, path = message.rpartition(" - at ")  # the last match: the text before it may quote the user
    if not found:
        reason, path = message, ""
    key = path.strip("`").removeprefix("$.") or "config"
    reason = reason.replace("`", "")
    if reason.startswith("Invalid enum value"):
        reason = f"expected {' | '.join(_choices(key))}"
    elif reason.startswith("Expected str, got") and "[" not in key and (known := _choices(key)):
        reason = f"expected {' | '.join(known)}"
    elif "matching regex" in reason:
        reason = f"expected {_meanings().get(key.partition('[')[0], reason)}"
    if reason == "Expected str, got object":
        reason += "; put text with braces in quotes"
    value: Any = raw
    for name in re.findall(r"[^.\[\]]+", key):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdigit():
            value = value[int(name)]
    given = f" (given: {reprlib.repr(value)})" if value is not None and not isinstance(value, Mapping) else ""
    return f"{key}: {reason[:1].lower()}{reason[1:]}{given}"


def _choices(key: str) -> tuple[str, ...]:
    *sections, last = key.split(".")
    section: Any = Config
    for name in sections:
        section = _hints(section)[name]
    return typing.get_args(_hints(section)[last])


@functools.cache
def _meanings() -> dict[str, str]:
    return {key: meaning for key, _, meaning in describe()}


def _known_keys() -> tuple[str, ...]:
    return tuple(_meanings())


@functools.cache
def _hints(section: type[Section]) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _name(value: Any) -> str:
    return reprlib.repr(value) if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
