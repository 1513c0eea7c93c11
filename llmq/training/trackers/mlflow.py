"""MLflow: the server or database of MLFLOW_TRACKING_URI, else the local folder `mlruns`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from llmq.training.trackers import TrackedRun, Tracker

OF_RUN = "llmq.run"  # the tag that has the id by which a resumed run is found
MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 500  # of one request; characters that every store takes of a value
STATUS = {"finished": "FINISHED", "failed": "FAILED"}  # others are KILLED


class MLflow(Tracker):
    """A run of MLflow, in the experiment `llmq` or that of MLFLOW_EXPERIMENT_NAME."""

    package, install = "mlflow", 'install llmq with its extra [mlflow], or `pip install "mlflow-skinny>=2.14"`'

    def __init__(self, experiment: str = "") -> None:
        """UsageError without mlflow."""
        super().__init__()
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "llmq"
        self._waiting: list[Any] = []

    def open(self, run: TrackedRun) -> int:
        """Begins a run with the options as its parameters, or goes on with that which has this id."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which waits for a network
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # skinny has no database
        from mlflow import MlflowClient

        self._client = client = MlflowClient(uri or "mlruns")
        there = client.get_experiment_by_name(self._experiment)
        experiment = there.experiment_id if there else client.create_experiment(self._experiment)
        found = client.search_runs([experiment], f"tags.`{OF_RUN}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return run.sent
        self._id = client.create_run(experiment, tags={OF_RUN: run.id}, run_name=run.name).info.run_id
        self._write_options(run.config)
        return -1

    def _write_options(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:LONGEST]) for name, value in config.items() if name != "llmq"]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start:][:MOST_PARAMS])
        self._client.log_dict(self._id, dict(config), "config.json")

    def numbers(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Collects them: a server takes as long for one as for many."""
        from mlflow.entities import Metric

        if len(self._waiting) + len(values) > MOST_METRICS:
            self.flush()
        self._waiting += [Metric(name, value, int(1000 * time), step) for name, value in values.items()]

    def flush(self) -> None:
        """Sends what is collected."""
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
            self._waiting = []

    def text(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A file of JSON among the run's artifacts."""
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._client.log_dict(self._id, table, f"{name}/step-{step:08}.json")

    def close(self, end: Mapping[str, Any]) -> None:
        """Ends the run with its status."""
        self.flush()
        self._client.set_terminated(self._id, STATUS.get(end.get("reason", ""), "KILLED"))
