"""Memory options made into roles to recompute and numbers of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llmq.errors import UsageError
from llmq.optimizers.rule import MASTER, Rule, kept, offload_option, spaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmq.options.maths import MemoryOptions
    from llmq.plan.precision import Precision
    from llmq.row import Row

AUTO: Final = "auto"  # --attn-bwd-chunks
# flag -> the roles it drops, as sublayers tag them on their slots
ROLES: dict[str, frozenset[str]] = {
    "recompute_swiglu": frozenset({"swiglu"}),
    "recompute_norm": frozenset({"norm"}),
    "recompute_ffn": frozenset({"swiglu", "ffn"}),
    "recompute_qkv": frozenset({"qkv"}),
    "recompute_att": frozenset({"qkv", "att"}),
    "recompute_block": frozenset({"swiglu", "norm", "ffn", "qkv", "att", "block"}),
}
# Automatic head chunks keep the logits of a chunk below the larger of these. On an H200 Qwen2.5-0.5B with an fp8 head
# is 2.3% faster in 4 chunks than in the 16 of 1 GiB each; a bf16 head does not care.
LOGITS_BYTES = 2**30
MUCH_SMALLER = 4  # than the limit: products of few tokens are slow, and there are as many more of them
LOGITS_SHARE = 48  # of the GPU's memory, as a divisor
PIECE_BYTES = 2**26  # of states on the host: takes 1.2 ms at 55 GB/s, a hundred times a copy's latency
RESIDUAL = "residual"  # the role of the streams that enter sublayers, for --offload-residual
# flag -> the space that lives on the host
HOSTED = {
    **{offload_option(space): space for space in (MASTER, "m", "v")},
    "offload_gradients": "grad",
    "offload_quants": "quant",
    "stream_weights": "weight",
}


@dataclass(frozen=True)
class Memory:
    """Resolved: recompute flags that are on, chunks of the head and of the attention backward.

    `drop` and `offload` name further slots that backward makes again, or fetches from the host; `offload` may name
    their roles, whose slots are made again where they are dropped. `host` names the spaces of tensors that live on the
    host, of which about `piece_bytes` at a time are fetched; with `zero_copy` the update reads and writes them there.
    What lives there may be `write_combined`. `fused`: weights are updated in backward.
    The MLP works on the tokens of a micro-batch in `seq_tiles`. Without `persistent_quants` the e4m3 copies of weights
    are made for each use.
    """

    flags: tuple[str, ...] = ()
    head_chunks: int = 1
    attention_chunks: int = 1
    drop: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    piece_bytes: int = PIECE_BYTES
    fused: bool = False
    seq_tiles: int = 1
    zero_copy: bool = False
    write_combined: bool = False
    persistent_quants: bool = True

    def hosts_weight(self, precision: Precision) -> Callable[[Row], bool] | None:
        """Which weights live on the host, if any: those of the layers, or of them what e4m3 matmuls read."""

        def is_streamed(row: Row) -> bool:
            if is_quant(row, precision):
                return self.persistent_quants
            return "weight" in self.host and _is_of_layer(row)

        return is_streamed if not {"weight", "quant"}.isdisjoint(self.host) else None

    @property
    def roles(self) -> frozenset[str]:
        """Roles of the slots that are recomputed."""
        return frozenset().union(*(ROLES[flag] for flag in self.flags))


def is_quant(row: Row, precision: Precision) -> bool:
    """Whether a parameter is a trained weight of a layer of which e4m3 matmuls read copies."""
    is_matrix = row.site is not None and len(row.shape) == 2
    return _is_of_layer(row) and is_matrix and precision.dtype(row.site or "") == "e4m3"


def _is_of_layer(row: Row) -> bool:
    return row.layer is not None and row.trainable


def is_to_fit(options: MemoryOptions) -> bool:
    """Whether settings are to be searched for."""
    return options.fit


def chooses_attention_chunks(options: MemoryOptions) -> bool:
    """Whether the chunks of the attention backward are to be found."""
    return options.attn_bwd_chunks == AUTO


def resolve(
    options: MemoryOptions,
    rule: Rule,
    *,
    batch_size: int,
    seq_len: int,
    logit_bytes: int,
    gpu_bytes: int = 0,
    own_master: bool = True,
    micro_steps: int = 1,
) -> Memory:
    """Checks the chunk counts against the batch; UsageError where they do not divide it.

    Automatic chunks of the attention backward are 1 here: `remedies.with_fitting_chunks` raises them to fit the device.
    `logit_bytes` is what the logits of one token take, `gpu_bytes` the memory of the GPU, if there is one. A master
    that is not its `own` is the weight that forward reads. A step has `micro_steps`.
    """
    flags = tuple(flag for flag in ROLES if getattr(options, flag))
    tokens, problems = batch_size * seq_len, []
    hosted = {flag for flag in HOSTED if getattr(options, flag)}
    hosted |= set(map(offload_option, spaces(rule))) if options.offload_optimizer else set()
    hosted |= {"offload_master"} if options.stream_weights else set()
    if not own_master and not options.stream_weights:
        if options.offload_master:
            raise UsageError(
                "--offload-master frees no memory in this run, whose weights are their own masters: leave it out, or "
                "use --master-dtype fp32"
            )
        hosted.discard("offload_master")
    kinds = set(map(offload_option, spaces(rule)))
    idle = [flag for flag in HOSTED if flag in hosted - kinds and flag.startswith("offload_opt_")]
    idle += ["offload_optimizer"] if options.offload_optimizer and not hosted & kinds else []
    # Refused and not ignored, like a recompute flag that frees nothing.
    if idle:
        flags_as_typed = ", ".join(f"--{flag.replace('_', '-')}" for flag in idle)
        raise UsageError(f"{flags_as_typed} frees no memory, as {kept(rule)}: leave it out")
    tiles = 1 if tokens % options.seq_tiles else options.seq_tiles
    head = options.lmhead_chunks or max(fewest_chunks(tokens, logit_bytes, gpu_bytes), tiles)
    if tokens % head:
        problems.append(
            f"--lmhead-chunks {head} does not divide the {tokens} tokens of a micro-batch ({batch_size} x {seq_len})"
        )
    # One here: how many are needed is known when the whole plan is.
    attention = 1 if options.attn_bwd_chunks == AUTO else options.attn_bwd_chunks
    if batch_size % attention:
        problems.append(f"--attn-bwd-chunks {attention} does not divide --batch-size {batch_size}")
    if tiles != options.seq_tiles:
        problems.append(
            f"--seq-tiles {options.seq_tiles} does not divide the {tokens} tokens of a micro-batch "
            f"({batch_size} x {seq_len})"
        )
    if problems:
        raise UsageError("; ".join(problems) + ": use a divisor")
    if options.fused_update and micro_steps != 1:
        raise UsageError(
            f"--fused-update needs one micro-batch a step, and a step has {micro_steps}: use --grad-accumulation 1"
        )
    offload = (RESIDUAL,) if options.offload_residual else ()
    host = tuple(space for flag, space in HOSTED.items() if flag in hosted)
    return Memory(
        flags,
        head,
        attention,
        offload=offload,
        host=host,
        fused=options.fused_update,
        seq_tiles=tiles,
        zero_copy=options.use_zero_copy,
        write_combined=options.write_combined,
        persistent_quants=options.persistent_quants,
    )


def fewest_chunks(tokens: int, logit_bytes: int, gpu_bytes: int = 0) -> int:
    """The smallest divisor of `tokens` that keeps the logits of a chunk within the limit above.

    Where the next one would cut them much smaller than needed (8191 tokens have no divisor but 1), the one below.
    """
    most = max(LOGITS_BYTES, gpu_bytes // LOGITS_SHARE)
    needed = min(-(-tokens * logit_bytes // most), tokens)
    fitting = (n for n in range(needed, min(MUCH_SMALLER * needed, tokens) + 1) if tokens % n == 0)
    below = (n for n in range(needed, 0, -1) if tokens % n == 0)
    return next(fitting, None) or next(below)
