"""Files for tests, as llmq writes them: token files, also as llm.q writes them (versions 1 and 2), checkpoints of a few
tensors, saved as a run on one rank saves them, and logs of runs, ours and one as llm.q writes it."""

import io
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.files.tensor_files import Piece
from llmq.files.writers import Keep, Saver, Snapshot, TensorSlice
from llmq.options.run import LogOptions
from llmq.screen import StartTask, unshown
from llmq.training.log import RunLog
from llmq.training.records import EvalRecord, TrainRecord


def write_tokens(path: str | Path, tokens: np.ndarray, *, mask: np.ndarray | None = None, **about: Any) -> None:
    """Writes `tokens` (n,) and, if given, `mask` (n,) bool as a whole file of one document."""
    with TokenWriter(path, has_masks=mask is not None, **about) as writer:
        writer.append(tokens, mask)


def verified(path: str | Path, vocab_size: int | None = None) -> TokenFile:
    """The file, of which all is read: tokens, whose ids are below `vocab_size` or that of the file, masks, documents.

    DataError for what is damaged.
    """
    file = TokenFile.open(path)
    if (bound := vocab_size or file.header.vocab_size) is not None:
        file.check_ids(bound)
    file.trained(0, file.num_tokens)
    assert len(file.document_starts) == file.num_documents + 1
    return file


def legacy_bytes(tokens: Sequence[int], vocab_size: int, mask: Sequence[bool] | None = None, version: int = 2) -> bytes:
    """The bytes of a file that llmq only reads, written independently with struct and loops."""
    head = b"BIN.TOK\n" + struct.pack("<3i", version, 4, len(tokens))
    if version == 2:
        head += struct.pack("<2i", vocab_size, 0 if mask is None else 1)
    body = struct.pack(f"<{len(tokens)}i", *tokens)
    return head + b"*" * (1023 - len(head)) + b"\n" + body + bits_of(mask or [])


def bits_of(mask: Sequence[bool]) -> bytes:
    """One bit a token, least significant first."""
    bits = bytearray(-(-len(mask) // 8))
    for i, trained in enumerate(mask):
        bits[i // 8] |= trained << (i % 8)
    return bytes(bits)


def slices_of(tensors: Mapping[str, np.ndarray]) -> list[TensorSlice]:
    """What one writer has of tensors that are its own."""
    return [TensorSlice.whole(Piece(name, array.shape, array.dtype)) for name, array in tensors.items()]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, np.ndarray],
    state: Mapping[str, Any] | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    keep: Keep | None = None,
    values: Iterable[tuple[str, np.ndarray]] | None = None,
    in_memory: bool = False,
    task: StartTask = unshown,
) -> Path:
    """Writes a checkpoint and returns its folder; `values` may be others than were planned for `tensors`."""

    def copies(into: Any) -> Iterable[tuple[str, np.ndarray]]:
        for name, array in tensors.items() if values is None else values:
            if into is not None:
                into(name)[...] = array
            yield name, array if into is None else into(name)

    memory = (lambda num_bytes: np.empty(num_bytes, np.uint8)) if in_memory else None
    with Saver(Path(folder), print, memory, task) as saver:
        saver.save(Snapshot(step, slices_of(tensors), copies, state or {}, metrics or {}), keep or Keep())
        path = saver.finished(wait=True)
    assert path is not None
    return path


def write_run(
    folder: Path,
    losses: Sequence[float],
    evals: Mapping[int, float],
    *,
    name: str | None = None,
    seconds: float = 100.0,
    whole: int = 0,
    samples: Sequence[dict[str, Any]] = (),
) -> Path:
    """A finished run with these training losses from step 1 on, and evaluation losses by step; of `whole` on more
    tokens. `samples` are of step 3."""
    options = LogOptions.model_validate({"name": name or folder.name, "log_file": str(folder / "log.jsonl")})
    with RunLog(options, io.StringIO()) as log:
        log.options({"name": options.name, "learning_rate": 1e-5})
        log.section("model", {"path": "tinyllama", "num_parameters": 7})
        log.begin()
        for step, loss in enumerate(losses, 1):
            epoch, applied = step / len(losses), math.isfinite(loss)
            log.train(TrainRecord(step, epoch, loss, 1.0 + step, 1e-4, seconds, 512, 512, applied=applied))
            if step in evals:
                log.evaluation(EvalRecord(step, epoch, evals[step], loss, 50.0, 512, 999 if step == whole else 512))
        if samples:
            log.record("samples", step=3, samples=samples)
        log.end("finished", eval_loss=0.5)
    return folder


def _object(kind: str, step: int, text: str, second: str = "0.5") -> str:
    """An object as llm.q formats it."""
    return f'  {{"log": "{kind}", "time": "2025-09-10 12:34:5{second}", "step": {step}, {text}}}'


def log_of_llm_q(steps: int = 4) -> str:
    """All kinds of objects, with NaN and infinity as C++ writes them, and quotes that are not escaped."""
    lines = [
        _object("cmd", 0, '"cmd": ["./train", "--name=a \\"b"]'),
        _object("option", 0, '"name": "name", "value": "c++"'),
        _object("option", 0, '"name": "learning-rate", "value": 1e-05'),
        _object("option", 0, '"name": "train-file", "value": "data/train.bin"'),
        _object("option", 0, '"name": "out-dir", "value": "a "quoted" folder"'),
        _object("gpu-model", 0, '"rank": 0, "id": 0, "name": "NVIDIA RTX 4090", "memory": 25757220864'),
        _object("sol", 0, '"rank": 0, "blocks": 7, "lm_head": 3, "attention": 1, "tps": 40000'),
        _object("dataset", 0, '"split": "train", "files": 1, "tokens": 5000, "seed": 7'),
        _object("allocator", 0, '"stats": [{"name": "weights", "device": 1048576, "managed": 0, "pinned": 2097152}]'),
        _object("info", 0, '"type": "message", "message": "Setup took 3 seconds"'),
    ]
    for step in range(steps):
        loss = "nan" if step == 2 else f"{5 / (step + 1)}"
        if step and step % 2 == 0:
            lines.append(_object("info", step, '"type": "message", "message": "saving checkpoint to `ckpt/c++`"'))
            numbers = f'"epoch": {step / 4}, "eval_tokens": 512, "duration_ms": 50, "loss": {3 - step / 10}'
            lines.append(_object("eval", step, numbers))
        for rank in (0, 1):
            state = '"clock": 2520, "power": 380500, "temperature": 61, "gpu_util": 98.5, "mem_util": -1, "fan": 0'
            state += f', "throttle": "power cap", "dram_free": {24 * 2**30 - rank}, "pcie_rx": 2000000, "pcie_tx": 0'
            lines.append(_object("gpu", step, f'"id": {rank}, {state}'))
        numbers = f'"epoch": {step / 4}, "step_tokens": 1024, "duration_ms": 100, "norm": {"-inf" if step == 2 else 2}'
        lines.append(
            _object("step", step, f'{numbers}, "loss": {loss}, "lr": 1e-05, "lse_max": 9.5', second=f"{step}.25")
        )
        times = '{"step": 0, "fwd": 30.0, "head": 5.0, "bwd": 60.0}, {"opt": 7.5}'
        lines.append(_object("info", step, f'"gpu": 0, "type": "time-breakdown", "breakdown": [{times}]'))
        maxes = '[\n          {"name": "a", "value": 2.5}, \n          {"name": "b", "value": 3.5}]'
        lines.append(_object("abs-maxes", step, f'"abs_maxes": {maxes}'))
    lines.append(_object("eval", steps, '"epoch": 1.0, "eval_tokens": 4096, "duration_ms": 400, "loss": 2.5'))
    lines.append(_object("info", steps, '"type": "message", "message": "Done. validation loss   2.500000"'))
    return "[\n" + ",\n".join(lines) + "\n]\n"
