"""Do the tests bite? Faults to plant, one at a time: `pytest --fault NAME`, or all with tools/plant_faults.py.

A fault is a function that stands in for one of llmq's while the tests run, and gets the real one first. Beside it are
its target and the test files that should notice it.
"""

from faults.fault import Fault, plant
from faults.table import FAULTS

__all__ = ["FAULTS", "Fault", "plant"]
