"""On whose behalf code runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["local", "on-premises", "any"]


@dataclass(frozen=True, slots=True)
class Principal:
    """A key's name, id and data policy. Id 0 is the system's own key, under the strictest policy: runs that
    Prefect's UI, a schedule or a script started have no other."""

    name: str = "system"
    key_id: int = 0
    policy: Policy = "local"


SYSTEM = Principal()
