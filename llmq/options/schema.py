"""The JSON schema of a `--config` file, made from the description of the options."""

from __future__ import annotations

from typing import Any

from llmq.options.field import flag
from llmq.options.other_names import STANDS_FOR
from llmq.options.parse import SECTIONS, descriptions


def json_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a `--config` file: every key in every spelling that is read."""
    properties: dict[str, Any] = {}
    for section in SECTIONS.values():
        fields = section.model_json_schema()["properties"]
        for d in (descriptions()[field.rstrip("_")] for field in fields):
            schema = {k: v for k, v in fields[d.field].items() if k not in ("aliases", "shown", "metavar", "kind")}
            schema["title"] = flag(d.key)
            if d.kind == "repeatable":  # a single one needs no list
                single = [kind["items"] for kind in schema["anyOf"] if "items" in kind]
                schema = {"title": schema.pop("title"), "anyOf": [{"type": "string"}, *single, schema]}
            elif d.kind == "optional_value":
                schema["anyOf"] = [{"type": "boolean"}, *schema["anyOf"]]
            for name in (d.key, *d.aliases):
                properties[name] = properties[name.replace("_", "-")] = schema
    for name, (key, _) in STANDS_FOR.items():
        properties[name] = properties[name.replace("_", "-")] = {"title": flag(key), "type": "boolean"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "llmq-train",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
