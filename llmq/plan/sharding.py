"""The options on what the ranks of a run share out, resolved."""

from llmq.comm.world import Copying
from llmq.errors import UsageError
from llmq.options.maths import ShardingOptions
from llmq.stores.sharding import Sharding
from llmq.tensor import Form

COMPRESSED = {"none": None, "e4m3": Form("e4m3", "row", "tilewise")}


def resolve(options: ShardingOptions, rank: int, size: int) -> Sharding:
    """What rank `rank` of `size` holds; a single one holds all."""
    if size == 1:
        return Sharding()
    level = options.zero_level
    return Sharding(
        rank,
        size,
        states=level >= 1,
        gradients=level >= 2 or options.shard_gradients,
        weights=level >= 3 or options.shard_weights,
        reduce_dtype=options.reduce_dtype,
        all_to_all=options.all_to_all_reduce or options.gradient_compression != "none",
        compressed=COMPRESSED[options.gradient_compression],
    )


def copying(options: ShardingOptions) -> Copying:
    """What copy engines move between the GPUs of a run; nothing is timed for an exchange that the run does not make."""
    exchanges = resolve(options, 0, 2).all_to_all
    return Copying(options.memcpy_all_gather, options.memcpy_send_recv if exchanges else False)


def refuse_copies(options: ShardingOptions, kind: str) -> None:
    """UsageError if copy engines are asked for on a device that has none."""
    given = Copying(options.memcpy_all_gather, options.memcpy_send_recv).demanded
    if kind == "cpu" and given:
        raise UsageError(f"{' and '.join(given)}: copy engines are parts of GPUs: leave it out, or use --device cuda")
