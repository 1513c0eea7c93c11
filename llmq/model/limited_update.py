"""The update of a run that skips spikes: the device compares the loss, so that no step waits for the host."""

from collections.abc import Mapping
from typing import Any

from llmq.model.optimizer import Updater
from llmq.tensor import Ref


class LimitedUpdater(Updater):
    """Applies no step whose loss is above the cell `loss_limit`."""

    def limit(self, ops: Any, agreed: Mapping[str, Ref]) -> None:
        """Compares the loss."""
        apply = self.cells["apply"]
        ops.apply_if_below(apply, apply, agreed["loss"], agreed["tokens"], self.cells["loss_limit"])
