"""Tasks of lm-evaluation-harness, run on a model that llmq reads and writes with."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from llmq.api.load import LoadedModel
from llmq.data.tokens.tokenize import Say
from llmq.errors import DataError, UsageError
from llmq.evaluation.held_out import weights_of
from llmq.files.hub import model_folder
from llmq.options.commands import GenerateOptions
from llmq.screen import StartTask


def run_tasks(
    names: Sequence[str],
    options: GenerateOptions,
    *,
    seq_len: int | None,
    limit: int | None,
    fewshot: int | None,
    chat_template: str | None,
    apply_chat_template: bool,
    include_path: str | None,
    say: Say,
    task: StartTask,
) -> Mapping[str, Any]:
    """The results of tasks: names that the harness knows, or finds in `include_path`, and YAML files.

    It does what `lm_eval.simple_evaluate` does, but for the list of the environment, which imports PyTorch.
    None as `seq_len` reads as many tokens as the model has positions, None as `fewshot` takes each task's own number.
    UsageError for a task that is not there, or a model without a tokenizer; DataError for data that is not.
    """
    if find_spec("lm_eval") is None:
        raise UsageError("--tasks needs lm-evaluation-harness: pip install 'llmq-train[harness]'")
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    from llmq.evaluation.harness import HarnessModel

    if absent := [name for name in names if Path(name).suffix in (".yaml", ".yml") and not Path(name).is_file()]:
        raise UsageError(f"--tasks {', '.join(absent)}: no such file")
    are_files = all(Path(name).is_file() for name in names)
    manager = TaskManager(include_path=include_path, include_defaults=not are_files)  # which reads thousands of files
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            near = get_close_matches(name, manager.all_tasks, n=3)
            fix = f"did you mean {' or '.join(near)}?" if near else "give a name or a YAML file"
            raise UsageError(f"--tasks {name}: lm-evaluation-harness has no such task: {fix}")
    weights = weights_of(options, say)
    source = weights.source
    if (named := source.tokenizer_folder or source.preset_tokenizer) is None:
        raise UsageError(f"{source.name} has no tokenizer: tasks are text")
    model = HarnessModel(
        partial(LoadedModel, weights, options.dtype, options.device, options.batch_size),
        model_folder(str(named), None, kind="tokenizer"),
        max_length=min(seq_len or source.config.max_position, source.config.max_position),
        batch_size=options.batch_size,
        chat_template=chat_template,
        name=str(options.model).replace("/", "__"),
        task=task,
    )
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    with redirect_stdout(sys.stderr):
        try:
            loaded = manager.load(list(names))
        except OSError as error:
            raise DataError(f"--tasks {','.join(names)}: their data cannot be read: {error}") from error
        for one in loaded["tasks"].values():
            given = one.get_config("num_fewshot")  # a task that says 0 has reasons
            one.set_config("num_fewshot", (given or 0) if given == 0 or fewshot is None else fewshot)
            one.set_fewshot_seed(DEFAULT_OTHER_SEED)
        found = evaluate(model, loaded, limit=limit, apply_chat_template=apply_chat_template, log_samples=False)
    assert found is not None, "this is the only process"
    return found


def table_of(found: Mapping[str, Any]) -> str:
    """The table that the harness prints of its results."""
    from lm_eval.utils import make_table

    groups = [make_table(found, "groups")] if found.get("groups") else []
    return "\n".join([make_table(found), *groups]).rstrip()
