"""Throughput: steps and single ops timed, beside the measured ceilings and rooflines."""
