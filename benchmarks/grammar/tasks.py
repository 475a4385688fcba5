"""The tasks: three JSON schemas and one regular expression, each with prompts that were written for this benchmark, and a
check of texts that shares no code with the grammar libraries.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """A grammar and the prompts that ask for its texts."""

    name: str
    prompts: tuple[str, ...]
    schema: dict[str, Any] = field(default_factory=dict)
    pattern: str = ""

    def is_valid(self, text: str) -> bool:
        """True if the text follows the grammar."""
        if self.pattern:
            return re.fullmatch(self.pattern, text) is not None
        try:
            return _fits(json.loads(text), self.schema)
        except json.JSONDecodeError:
            return False


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema of the kinds below."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= value.keys() <= known.keys()
            and all(_fits(entry, known[name]) for name, entry in value.items())
        )
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(_fits(entry, schema["items"]) for entry in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return is_integer and schema["minimum"] <= value <= schema["maximum"]
    return isinstance(value, bool)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _number(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


TASKS = (
    Task(
        "person",
        (
            "Invent a baker from a small town and describe the person as JSON.",
            "Describe a retired sea captain as JSON.",
            "Invent a student of geology and describe the person as JSON.",
            "Describe the conductor of a village orchestra as JSON.",
        ),
        schema=_object(
            name=_text(40),
            age=_number(18, 99),
            profession=_text(40),
            hobbies={"type": "array", "items": _text(30), "minItems": 1, "maxItems": 3},
            married={"type": "boolean"},
        ),
    ),
    Task(
        "ticket",
        (
            "A customer writes that the parcel arrived with a broken lamp. File a ticket as JSON.",
            "A customer cannot log in since yesterday. File a ticket as JSON.",
            "A customer asks for the invoice of last month. File a ticket as JSON.",
            "A customer thanks us for the quick repair. File a ticket as JSON.",
        ),
        schema=_object(
            category={"enum": ["delivery", "account", "billing", "feedback"]},
            priority={"enum": ["low", "normal", "high", "urgent"]},
            summary=_text(80),
            needs_reply={"type": "boolean"},
        ),
    ),
    Task(
        "route",
        (
            "Plan a walk of two stops through an old harbour, as JSON.",
            "Plan a bicycle tour of two stops along a river, as JSON.",
            "Plan a visit of two rooms of a museum of clocks, as JSON.",
            "Plan an evening with two concerts in a small city, as JSON.",
        ),
        schema=_object(
            title=_text(50),
            stops={
                "type": "array",
                "items": _object(place=_text(40), minutes=_number(1, 240)),
                "minItems": 2,
                "maxItems": 2,
            },
            total_minutes=_number(1, 600),
        ),
    ),
    Task(
        "appointment",
        (
            "When does the train to the coast leave? Invent a date, a time and a platform.",
            "When is the next appointment at the dentist? Invent a date, a time and a room.",
            "When does the ferry arrive? Invent a date, a time and a pier.",
            "When does the lecture on comets begin? Invent a date, a time and a hall.",
        ),
        pattern=r"date: 20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01]), time: ([01][0-9]|2[0-3]):[0-5][0-9], "
        r"place: (platform|room|pier|hall) [1-9][0-9]?",
    ),
)
