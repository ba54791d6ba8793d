"""The `site` and `pbs` sections: what a machine is like, and what this experiment asks of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from credit_like.schema.base import Duration, Section


class SiteSection(Section):
    """A batch system and its rules; one file per machine in `config/site/`."""

    name: str = "local"
    scheduler: Literal["pbs", "slurm", "local"] = "local"


class PbsSection(Section):
    account: str | None = None
    queue: str | None = None
    nodes: int = Field(default=1, ge=1)
    ngpus: int = Field(default=0, ge=0)
    """GPUs per node; 0 = a CPU run."""
    walltime: Duration = Field(default="01:00:00")  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _unquoted_walltime(cls, value: Any) -> Any:
        """YAML 1.1 reads an unquoted 12:00:00 as the number 43200."""
        if isinstance(value, dict) and isinstance(value.get("walltime"), int):
            return {**value, "walltime": f"{value['walltime']}s"}
        return value
