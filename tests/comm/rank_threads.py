"""Ranks that are threads of this process, with sockets between them."""

import threading
import time

from llmq.errors import WorldError


def at_once(size, work, *, pauses=None):
    """What `work(rank)` returns on each rank, or the WorldError that it raises, in threads that begin after pauses."""
    found = [None] * size

    def run(rank):
        time.sleep(pauses[rank] if pauses else 0)
        try:
            found[rank] = work(rank)
        except WorldError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found
