"""Weights & Biases: online with a key, else into a local folder for `wandb sync`."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmq.errors import UsageError
from llmq.training.trackers import FLUSH_S, TrackedRun, Tracker

INSTALL = 'install llmq with its extra [wandb], or `pip install "wandb>=0.20"`'


class Wandb(Tracker):
    """A run of W&B, whose history cannot be rewritten: steps that a resume makes again stay as they were.

    `mode` is online or offline; by default that of WANDB_MODE, or online with a key, so that nothing prompts for one.
    `patience` are the seconds that W&B may take at the end of a run, and twice as many at its start; 0: any time.
    """

    package, install = "wandb", INSTALL
    title = "Weights & Biases"

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        *,
        mode: str | None = None,
        patience: float = FLUSH_S,
    ) -> None:
        """UsageError for a project or a mode that W&B does not have, and without wandb."""
        project = (os.environ.get("WANDB_PROJECT") or "llmq") if project is None else project
        if not re.fullmatch(r"[^/\\#?%:]{1,128}", project):
            raise UsageError(
                f"{project!r} is not a project of W&B: use up to 128 characters without / \\ # ? % : (a user or team "
                "is the entity)"
            )
        self.mode: Any = mode or os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        if self.mode not in ("online", "offline"):
            raise UsageError(f"WANDB_MODE={self.mode} would send nothing: unset it, or set it to online or offline")
        super().__init__()
        self._about: dict[str, Any] = {"project": project, "entity": entity}
        self._name, self._patience = name, patience
        self._of_wandb: Any = None

    @property
    def url(self) -> str | None:
        """Where the run is online."""
        return self._of_wandb.url if self.mode == "online" else None

    @property
    def folder(self) -> Path:
        """W&B's local copy."""
        return Path(self._of_wandb.dir).parent

    def open(self, run: TrackedRun) -> int:
        """Begins the run, or goes on where W&B has it."""
        import wandb

        # Only what is in the log: not this machine's load, console or git state.
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False
        )
        if self._patience:  # else the end of the process waits until all is sent; `wandb sync` sends the rest
            known = {"init_timeout": 2 * self._patience, "finish_timeout": self._patience}
            settings = settings.model_copy(update={k: v for k, v in known.items() if k in type(settings).model_fields})
        self._of_wandb = wandb.init(
            **self._about,
            name=self._name or run.name,
            id=run.id,
            config=dict(run.config),
            mode=self.mode,
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",  # beside a run that is the caller's own
            settings=settings,
            allow_val_change=True,
        )
        return self._of_wandb.step - 1 if self.mode == "online" else run.sent

    def numbers(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Adds to the step, which W&B would else date to now."""
        self._of_wandb.log({**values, **({"_timestamp": time} if time == time else {})}, step=step)

    def text(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table at the step."""
        import wandb

        self._of_wandb.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def close(self, end: Mapping[str, Any]) -> None:
        """How the run ended goes into its summary."""
        self._of_wandb.summary.update({f"end/{name}": value for name, value in end.items()})
        self._of_wandb.finish(exit_code=int(end.get("reason") not in ("finished", None)))


def has_key() -> bool:
    """Whether W&B finds a key without asking: in the environment, or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
