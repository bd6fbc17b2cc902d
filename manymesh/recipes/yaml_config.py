"""A run's config as plain data: from a YAML file, with `path.to.key=value` from the command line on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError


def load_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping.
    """
    import yaml

    try:
        data = yaml.load(Path(path).read_text(), Loader=_yaml_loader())
    except OSError as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}", have=error.strerror) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML", have=str(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no mapping", have=type(data).__name__)
    return data


def laid_over(data: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `data` with the values of `over` in place of its own; mappings are merged key by key."""
    out = dict(data)
    for key, value in over.items():
        mine = out.get(key)
        out[key] = laid_over(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return out


def override(data: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with `path.to.key=value` applied; values are read as YAML.

    Raises:
        ConfigError: an assignment without "=", or a path through something that is no mapping.
    """
    import copy

    import yaml

    out = copy.deepcopy(dict(data))
    for text in assignments:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"cannot read the override {text!r}", want="path.to.key=value")
        *parents, last = path.split(".")
        node = out
        for depth, key in enumerate(parents):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                at = ".".join(parents[: depth + 1])
                raise ConfigError(f"{at} is not a mapping, so {path} cannot be set", have=repr(node))
        node[last] = yaml.load(value, Loader=_yaml_loader())
    return out


def _yaml_loader() -> Any:
    """The safe loader, with 1e-3 read as a number (YAML 1.2) where PyYAML's 1.1 reads a string."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader
