"""What training adds to the loss and to the embedded tokens, so that they stay small and the model robust."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmq.options.maths import RegularizationOptions


@dataclass(frozen=True)
class Regularization:
    """Weight of the squared log-partition in the loss (z_loss), and size of the noise on embedded tokens
    (neftune_alpha); 0 adds nothing."""

    z_loss: float = 0.0
    neftune_alpha: float = 0.0


UNREGULARIZED = Regularization()


def resolve(options: RegularizationOptions) -> Regularization:
    """The options as constants."""
    return Regularization(options.z_loss, options.neftune_alpha)
