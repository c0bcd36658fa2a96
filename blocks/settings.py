"""Where things are and who may talk to whom, for every process of an installation.

Read from `SMI_*` environment variables first, then from `settings.json` in the home folder, which
`smi up` writes (mode 0600). A machine that joins another installation needs `SMI_PREFECT_URL`,
`SMI_PREFECT_AUTH`, `SMI_JOIN_TOKEN`, `SMI_DATABASE_URL` and `SMI_VECTORS_URL`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from blocks.errors import ConfigurationError

Port = Annotated[int, Field(ge=0, le=65535)]


def default_home() -> Path:
    """`~/.smi`; as root `/var/lib/smi`: the PostgreSQL wheel opens up every ancestor of its folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/smi")
    return Path.home() / ".smi"


class HomeFile(PydanticBaseSettingsSource):
    """`settings.json` of the home folder."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        home = Path(self.current_state.get("home") or default_home())
        try:
            values = json.loads((home / "settings.json").read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigurationError(f"{home / 'settings.json'} is not JSON ({error}); remove it") from error
        return dict(values)


class Settings(BaseSettings):
    """Settings of one process. Ports of 0 mean: any free one."""

    model_config = SettingsConfigDict(env_prefix="SMI_", extra="ignore")

    home: Path = Field(default_factory=default_home)
    host: str = "127.0.0.1"
    api_port: Port = 8000
    node_port: Port = 8100
    prefect_port: Port = 4200
    prefect_auth: SecretStr | None = Field(None, description="Prefect's auth string, `user:password`")
    prefect_url: str | None = Field(None, description="Prefect's API, ending in /api")
    database_url: SecretStr | None = Field(None, description="SQLAlchemy URL, postgresql+asyncpg://...")
    join_token: SecretStr | None = Field(None, description="shared by the API and its nodes")
    max_upload: ByteSize = Field(ByteSize(512 * 2**20), description="bytes of the largest upload taken")
    storage_url: str | None = Field(
        None, description="fsspec URL of requests and results; default home/storage"
    )
    public_url: str | None = Field(
        None, description="where browsers reach the API, for links; default http://host:api_port"
    )
    link_days: float = Field(7, gt=0, description="days that links to files stay good")
    local_files: Path | None = Field(
        None, description="folder whose files runs that Prefect's UI or a schedule starts may read by `path`"
    )
    artifacts: bool = Field(
        True, description="whether transcripts, answers and links to files of jobs are shown in Prefect's UI"
    )
    vectors_url: str | None = Field(
        None,
        description="gRPC target of the vectors service, unix:PATH or, on loopback, host:port; "
        "default unix:home/vectors/service.sock",
    )
    milvus_url: str | None = Field(
        None, description="Milvus server behind the vectors service; default Milvus Lite in home/vectors"
    )
    milvus_token: SecretStr | None = Field(None, description="the Milvus server's token, `user:password`")
    live_runs_days: float = Field(7, gt=0, description="days that Prefect keeps the record of a live run")
    live_runs_max: int = Field(50_000, ge=0, description="records of live runs that Prefect keeps at most")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, HomeFile(settings_cls)

    def require(self, name: str) -> str:
        """The value of a setting that this process cannot do without.

        Raises:
            ConfigurationError: naming the setting, where it was looked for and the cure.
        """
        value = getattr(self, name)
        if value is None:
            raise ConfigurationError(
                f"setting {name!r} is missing: set SMI_{name.upper()}, or start the installation with "
                f"`smi up --home {self.home}`, which writes {self.home / 'settings.json'}"
            )
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    @property
    def url(self) -> str:
        """Where the API is for a browser; no slash at its end."""
        return (self.public_url or f"http://{self.host}:{self.api_port}").rstrip("/")

    @property
    def storage(self) -> str:
        return self.storage_url or f"file://{self.home / 'storage'}"

    @property
    def vectors(self) -> str:
        return self.vectors_url or f"unix:{self.home / 'vectors' / 'service.sock'}"


def load_settings(**overrides: Any) -> Settings:
    """Settings of this process; `overrides` (command-line options) win, those that are None do not count.

    Raises:
        ConfigurationError: naming the setting, its bad value and what would be right.
    """
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"setting {name!r} (SMI_{name.upper()}) is wrong: {first['msg'].lower()}"
        ) from error
