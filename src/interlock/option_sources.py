"""Reading options from the command line, a config file, the environment and Python keywords.

Precedence: command line, then ``--config`` file, then ``INTERLOCK_*`` variables. Every name that is not an
option is refused with the nearest one, also when it is another engine's spelling of the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from interlock.errors import Refusal
from interlock.option_kinds import AUTO, Auto, Kind, Option, closest
from interlock.options import OPTIONS, Given, Options

ENV_PREFIX: Final = "INTERLOCK_"
CONFIG_ENV: Final = "INTERLOCK_CONFIG"
API_KEY_OPTIONS: Final = frozenset({"api_key", "api_key_file"})


def gather(
    flags: Mapping[str, str | bool | None], *, config: str | None, environ: Mapping[str, str]
) -> Options:
    """Merge the three sources.

    Args:
        flags: option name -> text from the command line; None or absent where it was not given.
        config: path of ``--config``, or None to look at ``INTERLOCK_CONFIG``.
        environ: the process environment; only ``INTERLOCK_*`` is read.

    Raises:
        Refusal: an unknown name or an unreadable value, with the source's own spelling of it.
    """
    config = config or environ.get(CONFIG_ENV)
    layers = (
        _from_environment(environ),
        _from_file(config) if config else {},
        {name: _read(OPTIONS[name], text, OPTIONS[name].flag, _origin(name))
         for name, text in flags.items() if text is not None},
    )  # fmt: skip
    return _merge(layers)


def _origin(name: str) -> str:
    return "argument MODEL" if name == "model" else f"flag {OPTIONS[name].flag}"


def from_keywords(values: Mapping[str, object]) -> Options:
    """Options from Python keywords, ``{"tp_size": 2}``; None is "not given"."""
    unknown = [name for name in values if name not in OPTIONS]
    if unknown:
        raise _unknown(unknown[0], "keyword", tuple(OPTIONS), lambda name: name)
    return _merge(
        [
            {
                name: _read(OPTIONS[name], _text(value), name, f"keyword {name}")
                for name, value in values.items()
                if value is not None
            }
        ]
    )


def unknown_flag(flag: str, known: Iterable[str] = ()) -> Refusal:
    """The refusal of a command-line flag that no option has; ``known``: further flags of the verb."""
    flags = (*(option.flag for option in OPTIONS.values()), "--config", *known)
    return _unknown(flag, "", flags, lambda name: OPTIONS[name].flag)


def _merge(layers: Iterable[Mapping[str, Given | Auto]]) -> Options:
    merged: dict[str, Given | Auto] = {}
    for layer in layers:
        if layer.keys() >= API_KEY_OPTIONS:
            raise Refusal(
                option="--api-key",
                given="***",
                rule="and --api-key-file are both set; which of them counts is not clear",
                alternatives=("--api-key-file PATH",),
            )
        if API_KEY_OPTIONS & layer.keys():
            merged = {name: item for name, item in merged.items() if name not in API_KEY_OPTIONS}
        merged.update(layer)
    return Options({name: item for name, item in merged.items() if isinstance(item, Given)})


def _read(option: Option, text: str | bool, spelled: str, origin: str) -> Given | Auto:
    if isinstance(text, bool):
        text = "on" if text else "off"
    value = option.parse(text, spelled)
    return value if isinstance(value, Auto) else Given(value, origin)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given | Auto]:
    by_env = {option.env: option for option in OPTIONS.values()}
    found: dict[str, Given | Auto] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name == CONFIG_ENV:
            continue
        if name not in by_env:
            names = (*by_env, CONFIG_ENV)
            raise _unknown(name, "environment variable", names, lambda name: OPTIONS[name].env)
        option = by_env[name]
        found[option.name] = _read(option, text, name, f"environment variable {name}")
    return found


def _from_file(path: str) -> dict[str, Given | Auto]:
    content = _load_yaml(path)
    found: dict[str, Given | Auto] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in OPTIONS:
            raise _unknown(str(key), f"key of {path},", tuple(OPTIONS), lambda name: name)
        if name in found:
            raise Refusal(option=f"--config {path}", given=key, rule="is in the file twice")
        found[name] = _read(OPTIONS[name], _text(value, key=key, path=path), str(key), f"{path}, key {key}")
    return found


def _load_yaml(path: str) -> Mapping[Any, Any]:
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """A safe loader that refuses a key that is given twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise Refusal(option=f"--config {path}", given=twice, rule="is in the file twice")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(option="--config", given=path, rule=f"cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise Refusal(option="--config", given=path, rule=f"is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise Refusal(option="--config", given=path, rule="must be a mapping such as `tp_size: 2`")
    return content


def _text(value: object, *, key: object = "", path: str = "") -> str | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float | Path):
        return str(value)
    where = f"--config {path}" if path else "keyword"
    raise Refusal(option=where, given=f"{key}: {value!r}", rule="must be a text, a number or a switch")


def _unknown(name: str, what: str, known: tuple[str, ...], spell: Any) -> Refusal:
    """Peers' spellings are looked up first, then near misses among ``known``."""
    bare = name.removeprefix(ENV_PREFIX).lstrip("-").lower().replace("_", "-")
    peers = [spell(option.name) for option in OPTIONS.values() if bare in option.peers]
    near = peers or list(closest(name, known))
    if not near:
        near = [spell(other) for other in closest(bare.replace("-", "_"), tuple(OPTIONS))]
    rule = f"{what} is not an option".strip() if what else "is not an option"
    if near:
        rule += f"; did you mean {' or '.join(near)}?"
    if bare == "trust-remote-code":
        rule = "no code of a checkpoint is ever run, so there is nothing to trust"
    return Refusal(option=name, given="", rule=rule)


def describe_default(option: Option) -> str:
    """The default as help and docs show it."""
    if option.default is AUTO:
        return "auto"
    if option.default is None:
        return "not set"
    if option.kind is Kind.SWITCH:
        return "on" if option.default else "off"
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
