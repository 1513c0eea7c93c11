"""The methods of adaptation, by which options and folders are read."""

from llmq.adapters.adalora import AdaLora
from llmq.adapters.ia3 import Gains
from llmq.adapters.lora import Lora
from llmq.adapters.method import Method
from llmq.adapters.part import PartOfModel
from llmq.adapters.virtual_tokens import Prefix, Prompt

METHODS: tuple[type[Method], ...] = (Lora, Gains, AdaLora, Prompt, Prefix, PartOfModel)
