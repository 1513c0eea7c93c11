"""Faults to plant in the source, one at a time: tools/plant_faults.py checks that each turns the tests red.

A fault is an exact text of one file, found there once, and what stands there instead. Its tests are the files most
likely to notice it, run first. tests/test_faults.py keeps the tables in step with the source.
"""

from faults.fault import Fault, planted
from faults.of_models import MATHS, MODELS, STORAGE
from faults.of_runs import DATA, FILES, LOOP, STEP

FAULTS: tuple[Fault, ...] = (*MATHS, *STORAGE, *MODELS, *STEP, *LOOP, *DATA, *FILES)

__all__ = ["FAULTS", "Fault", "planted"]
