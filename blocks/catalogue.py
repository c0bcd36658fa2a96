"""The catalogue: which models there are, by name, and what each needs.

`deployments/models.toml` ships with SMI; `models.toml` in the home folder adds models and overrides
single fields of those that ship. A name or alias that the home folder's file gives to a model is that
model's, whichever had it before: `aliases = ["gpt-4o-mini"]` points OpenAI's name to a model of one's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from blocks.addresses import is_ours
from blocks.errors import ConfigurationError, ModelNotFound
from blocks.validation import quoted

Tier = Literal["local", "cloud"]


def _tier(fields: dict[str, Any]) -> Tier:
    source = fields.get("source", "")
    return "cloud" if "://" in source and not is_ours(source) else "local"


class Model(BaseModel):
    """One entry of the catalogue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    aliases: tuple[str, ...] = ()
    task: str = Field(description="what it does, and so which adapter: chat, transcription, ...")
    driver: str = Field(description="which driver loads it: an entry point of group smi.drivers")
    source: str = Field(
        default="",
        description="package:NAME/PATH (weights in a Python package), apart:PACKAGE/PATH (in one installed "
        "apart), hf:ORG/NAME (hub), a path, or a URL",
    )
    tier: Tier = Field(
        default_factory=_tier,
        description="cloud: its `source` is somebody else's machine, and data leaves us. So is any URL that "
        "is not said to be local, unless its host is localhost or a loopback, private or link-local address",
    )
    memory: ByteSize = Field(ByteSize(0), description="resident bytes while it works, measured")
    context: int | None = Field(None, description="tokens of prompt and answer together")
    slots: int = Field(1, ge=1, description="requests it works on at once")
    queue: int = Field(64, ge=0, description="requests that may wait for a slot before others are refused")
    load_timeout_s: float = Field(120, gt=0, description="seconds a load may take")
    licence: str = ""
    owned_by: str = "smi"
    options: dict[str, Any] = Field(default_factory=dict, description="as the driver defines them")


class Catalogue:
    """Models by name or alias."""

    def __init__(self, models: list[Model]) -> None:
        self._models = {model.name: model for model in models}
        self._names = {name: model for model in models for name in (*model.aliases, model.name)}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def get(self, name: str, task: str | None = None) -> Model:
        """The model called `name`, checked to be one for `task`.

        Raises:
            ModelNotFound: with the names that would be right.
        """
        model = self._names.get(name)
        if model is None or (task is not None and model.task != task):
            fitting = [entry.name for entry in self if task in (None, entry.task)]
            known = f"is for {model.task}, not {task}" if model else "does not exist"
            raise ModelNotFound(
                f"model {quoted(name)} {known}; there are: {', '.join(fitting)}", param="model"
            )
        return model

    def default(self, task: str) -> Model:
        """The first model of `task`."""
        for model in self:
            if model.task == task:
                return model
        raise ModelNotFound(f"the catalogue has no model for {task}", param="model")


def load_catalogue(home: Path) -> Catalogue:
    """The shipped catalogue with the home folder's additions.

    Raises:
        ConfigurationError: naming the file, the model and the field at fault.
    """
    shipped = _read(Path(__file__).parent.parent / "deployments" / "models.toml")
    own = _read(home / "models.toml")
    tables = {
        name: _without(table, set(own).union(*map(_aliases, own.values()))) for name, table in shipped.items()
    }
    for name, table in own.items():
        tables[name] = {**tables.get(name, {}), **table}
    _check_names(tables, home / "models.toml")
    models = []
    for name, table in tables.items():
        try:
            models.append(_known(Model(name=name, **table)))
        except (ValidationError, TypeError, ValueError) as error:
            raise ConfigurationError(f"models.toml, model {name!r}: {error}") from error
    return Catalogue(models)


def _aliases(table: dict[str, Any]) -> list[str]:
    """A model's aliases; none if they are not what they should be, which is told when it is checked."""
    given = table.get("aliases", [])
    return [alias for alias in given if isinstance(alias, str)] if isinstance(given, list) else []


def _without(table: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    return {**table, "aliases": [alias for alias in _aliases(table) if alias not in taken]}


def _check_names(tables: dict[str, dict[str, Any]], path: Path) -> None:
    """Each name means one model."""
    owners: dict[str, str] = {}
    for name, table in tables.items():
        for alias in _aliases(table):
            other = owners.setdefault(alias, name)
            if alias in tables and alias != name:
                raise ConfigurationError(f"{path}: alias {alias!r} of model {name!r} is another model's name")
            if other != name:
                raise ConfigurationError(
                    f"{path}: models {other!r} and {name!r} both have the alias {alias!r}; leave it to one"
                )


def _known(model: Model) -> Model:
    """`model`, if somebody knows its task and its driver: entry points, ours or a third party's."""
    for group, kind, name in (("smi.adapters", "task", model.task), ("smi.drivers", "driver", model.driver)):
        names = sorted(entry_points(group=group).names)
        if name not in names:
            raise ValueError(f"{kind} {name!r} is not installed; there are: {', '.join(names)}")
    return model


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigurationError(
                f"{path}: {name} = {table!r} is not a model; write [{name}] and its fields below"
            )
    return tables
