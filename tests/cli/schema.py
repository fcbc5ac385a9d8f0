"""The JSON schema in docs/dump.md, and a validator for what it uses of the language."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "null": type(None),
}
KEYWORDS = {
    "$schema", "$defs", "$ref", "type", "enum", "const", "oneOf", "description",
    "properties", "required", "additionalProperties", "items",
}  # fmt: skip


def documented() -> dict[str, Any]:
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/dump.md").read_text(), re.DOTALL)
    schema: dict[str, Any] = json.loads(text)
    return schema


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """Where ``value`` breaks the schema."""
    unknown = schema.keys() - KEYWORDS
    assert not unknown, f"the validator does not know {unknown}"
    if "$ref" in schema:
        return problems(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    if "oneOf" in schema:
        tried = [problems(value, each, root, at) for each in schema["oneOf"]]
        return [] if tried.count([]) == 1 else [f"{at}: {value!r} fits {tried.count([])} forms"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is not one of {schema['enum']}"]
    if "const" in schema and value != schema["const"]:
        return [f"{at}: {value!r} is not {schema['const']!r}"]
    if "type" in schema and not isinstance(value, KINDS[schema["type"]]):
        return [f"{at}: {value!r} is no {schema['type']}"]
    if isinstance(value, list):
        inner = schema.get("items", {})
        return [p for i, v in enumerate(value) for p in problems(v, inner, root, f"{at}[{i}]")]
    if not isinstance(value, dict):
        return []
    found = [f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value]
    for name, member in value.items():
        more = schema.get("additionalProperties", {})
        each = schema.get("properties", {}).get(name, more)
        if each is False:
            found.append(f"{at}: {name} is not in the schema")
        else:
            found += problems(member, each, root, f"{at}.{name}")
    return found
