"""Types of the values of config.json, with their limits."""

from typing import Annotated

from pydantic import Field

LARGEST = 2**31 - 1  # token ids and sizes are held in int32
# Beyond any model, and planned in seconds: a damaged config.json would be planned for hours.
MAX_LAYERS = 256  # twice those of the deepest, at 40 ms of planning each
MAX_WIDTH = 2**20  # of what a layer computes
MAX_VOCABULARY = 2**24

Size = Annotated[int, Field(ge=1, le=LARGEST)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Positive = Annotated[float, Field(gt=0, lt=1e30, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, lt=1e30, allow_inf_nan=False)]
