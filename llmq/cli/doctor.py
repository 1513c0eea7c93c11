"""llmq-doctor: what is wrong with this machine, and what to do about it."""

import click

from llmq.cli import shell


@shell.version_option
@click.command(
    "llmq-doctor", context_settings=shell.SETTINGS, epilog="Exit code 0: nothing is at fault, 1: something is."
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document instead of lines.")
@click.option("--speed/--no-speed", default=True, show_default=True, help="Measure GPUs, copies, links and disks too.")
def command(as_json: bool, speed: bool) -> int:
    """Checks this machine for training, within 20 seconds, and says what to do about each fault.

    It looks at the driver and NVIDIA's libraries, Python packages, GPUs and their links, memory, disks and the Hub, and
    measures matrix products, copies and an all-reduce against what the cards should reach. A machine without a GPU is
    not at fault: runs train on its CPU.
    """
    # Imported here, so that --help does not wait for them.
    from llmq.doctor.show import run

    return run(as_json=as_json, speed=speed)


if __name__ == "__main__":
    shell.main(command)
