"""What trackers' own packages have written into local folders, read by these packages as far as they read it."""

import json
import struct
import time

BLOCK = 2**15
PATIENCE_S = 30.0  # W&B's own process writes on after a run is finished here


def wandb_records(path):
    """The records of a file that `wandb sync` uploads: LevelDB's log, in blocks, of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too little for a header: padding
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):  # it is not written yet
            break
        whole, at = whole + data[at + 7 :][:size], at + 7 + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(Record.FromString(whole))
            whole = b""
    return found


def wandb_run(path):
    """Of such a file: the numbers and tables by step, as W&B merges them, the config, and the summary."""
    steps, config, summary = {}, {}, {}
    ends = time.monotonic() + PATIENCE_S
    records = wandb_records(path)
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < ends, f"{path} is of no run that has ended"
        time.sleep(0.01)
        records = wandb_records(path)
    for record in records:
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            steps.setdefault(items.pop("_step"), {}).update(items)
        elif record.HasField("run"):
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        elif record.HasField("summary"):
            summary |= {one.key: json.loads(one.value_json) for one in record.summary.update}
    return steps, config, summary
