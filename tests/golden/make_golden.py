"""Makes the golden files: what transformers and torch.optim.AdamW compute for the models of families.py.

    python tests/golden/make_golden.py [FAMILY ...]        (needs torch and transformers; writes FAMILY.safetensors)

References are f64 throughout; transformers_judge.py says how transformers is brought to that.
A file holds, as safetensors:

    logits (B,T,V) f32, loss (1,) f64    of batch 1; the loss is the mean over trained tokens
    grad/NAME f64                        sketch of the gradient of that loss
    losses, norms (STEPS,) f64           of the AdamW run: loss, and norm of the gradient before clipping
    change/NAME f32                      sketch of the weights after the AdamW run minus those before it
    f32_change_error/NAME (1,) f64       norm of the error of that change in an f32 run of transformers, over its norm
    bf16_error/NAME (1,) f64             norm of the error of transformers' bf16 gradient over the tensor's norm, root
                                         mean square over batches 1..BATCHES_BF16

Families beyond these (more_families.py) are in one file, `python tests/golden/make_golden.py more`: FAMILY/loss f64,
FAMILY/logits f32 (B,V) of the last tokens, and sketches FAMILY/grad/NAME f32, of batch 1.

and, as JSON in its metadata, the fingerprint of the inputs and the versions of the libraries that made it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from more_families import MORE, MORE_LENGTH, ROPES  # noqa: E402

from golden import families, transformers_judge  # noqa: E402


def golden(family: str) -> dict[str, np.ndarray]:
    """Everything a golden file holds."""
    config = families.FAMILIES[family]
    vocab, start = config["vocab_size"], families.weights(config)
    held: dict[str, np.ndarray] = {}
    with transformers_judge.doubled():
        model = transformers_judge.model_of(config, start, "float64")
        held["logits"] = transformers_judge.logits_of(model, families.batch(vocab, 1)[0]).astype(np.float32)
        exact = []
        for index in range(1, families.BATCHES_BF16 + 1):
            loss = transformers_judge.backward(model, *families.batch(vocab, index))
            exact.append(transformers_judge.gradients(model))
            held.setdefault("loss", np.array([loss]))
        losses, norms = transformers_judge.adamw_run(model, config)
        end = transformers_judge.parameters(model)
    held["losses"], held["norms"] = np.array(losses), np.array(norms)
    for name, gradient in exact[0].items():
        held[f"grad/{name}"] = families.sketch(name, gradient)
        held[f"change/{name}"] = families.sketch(name, end[name] - start[name]).astype(np.float32)
    model = transformers_judge.model_of(config, start, "float32")
    transformers_judge.adamw_run(model, config)
    for name, found in transformers_judge.parameters(model).items():
        error = np.linalg.norm(found - end[name]) / np.linalg.norm(end[name] - start[name])
        held[f"f32_change_error/{name}"] = np.array([error])
    model = transformers_judge.model_of(config, start, "bfloat16")
    squares = dict.fromkeys(start, 0.0)
    for index, right in enumerate(exact, 1):
        transformers_judge.backward(model, *families.batch(vocab, index))
        for name, rounded in transformers_judge.gradients(model).items():
            squares[name] += (np.linalg.norm(rounded - right[name]) / np.linalg.norm(right[name])) ** 2
    for name, square in squares.items():
        held[f"bf16_error/{name}"] = np.array([np.sqrt(square / len(exact))])
    return held


def more_golden() -> dict[str, np.ndarray]:
    """What the one file holds of the families beyond."""
    held: dict[str, np.ndarray] = {}
    for family, config in (MORE | ROPES).items():
        named = transformers_judge.empty_model(config).named_parameters()
        start = families.weights(config, shapes={name: tuple(value.shape) for name, value in named})
        tokens, targets = families.batch(config["vocab_size"], 1, length=MORE_LENGTH)
        with transformers_judge.doubled():
            model = transformers_judge.model_of(config, start, "float64")
            held[f"{family}/logits"] = transformers_judge.logits_of(model, tokens)[:, -1].astype(np.float32)
            held[f"{family}/loss"] = np.array([transformers_judge.backward(model, tokens, targets)])
            for name, value in transformers_judge.gradients(model).items():
                held[f"{family}/grad/{name}"] = families.sketch(name, value).astype(np.float32)
    return held


def main(names: list[str]) -> None:
    """Writes the files of the named families, or of all."""
    torch.set_num_threads(1)  # one order of sums: the same bytes again on the same machine
    if not names or "more" in names:
        versions = {"made_with": f"torch {torch.__version__}, transformers {transformers.__version__}"}
        save_file(more_golden(), path := HERE / "more_families.safetensors", versions)
        path.chmod(0o644)
        names = [name for name in names or families.FAMILIES if name != "more"]
    for family in names:
        held = {k: np.ascontiguousarray(v) for k, v in golden(family).items()}
        made_of = {
            "fingerprint": families.fingerprint(families.FAMILIES[family]),
            "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}",
        }
        metadata = {"made_of": json.dumps(made_of)}  # one entry: safetensors writes several in an order of chance
        path = HERE / f"{family}.safetensors"
        save_file(held, path, metadata)
        path.chmod(0o644)
        clipped = np.mean(held["norms"] > families.grad_clip(families.FAMILIES[family]))
        print(f"{path.name}: {path.stat().st_size} bytes, loss {held['loss'][0]:.4f}, {clipped:.0%} of steps clipped")


if __name__ == "__main__":
    main(sys.argv[1:])
