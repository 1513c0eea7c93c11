"""--eval-metrics: how near the model's answers to held-out questions come to those there, while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmq.generation.answers import ROUGE, answer_scores, require_packages
from llmq.training.callbacks import Callback, Run
from llmq.training.log import RunLog
from llmq.training.records import EvalRecord

if TYPE_CHECKING:
    from llmq.generation.answers import Exercise


class AnswerMetrics(Callback):
    """Logs `eval_exact_match` and others at every evaluation. One that fails is a warning, and NaN in the history."""

    def __init__(self, log: RunLog) -> None:
        """UsageError for a metric whose package is not installed."""
        self._log, self._metrics = log, log.eval_metrics or ()
        require_packages(self._metrics)
        self.asks: Sequence[Exercise] = ()  # what prepare has found

    def on_evaluate(self, run: Run, record: EvalRecord) -> None:
        """Answers all questions, and logs the scores."""
        try:
            found = run.generate([list(one.prompt) for one in self.asks])
            answers, references = [one.text or "" for one in found], [one.reference for one in self.asks]
            scores = {f"eval_{name}": it for name, it in answer_scores(self._metrics, answers, references).items()}
            run.log(**scores)
            if run._ready.earlier.checkpoints.improves(scores):  # which the other ranks cannot know
                run.save()
        except Exception as error:
            if not run._is_served:  # the other ranks do not wait any more
                raise
            text = f"--eval-metrics failed: {type(error).__name__}: {error}"
            (self._log.notice if text in self._log.warnings else self._log.warn)(text)
            names = [name for one in self._metrics for name in (ROUGE if one == "rouge" else (one,))]
            run.history.add(run.step, {f"eval_{name}": math.nan for name in names})
