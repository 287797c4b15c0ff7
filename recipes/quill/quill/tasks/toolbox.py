"""The tools of Quill's world: function schemas with ways to ask for them.

Half of them have the names strangers try (weather, calculator); the others are put together from a verb, a noun and
parameters, so that Quill reads the schema it is given instead of knowing a fixed set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from quill.chat import Json
from quill.invention import any_city, any_name
from quill.words import COLOURS, DAYS, FOODS, NOUNS, THINGS, VERBS


@dataclass(frozen=True)
class Parameter:
    """A parameter, the words that bring it into a request, and how its values are drawn."""

    name: str
    kind: str
    description: str
    phrase: str

    def draw(self, rng: Random) -> Json:
        return DRAW[self.name](rng)


DRAW: dict[str, Callable[[Random], str | int]] = {
    "city": any_city,
    "location": any_city,
    "day": lambda rng: rng.choice((*DAYS, "today", "tomorrow")),
    "people": lambda rng: rng.randint(1, 20),
    "count": lambda rng: rng.randint(1, 99),
    "name": any_name,
    "recipient": any_name,
    "color": lambda rng: rng.choice(COLOURS),
    "item": lambda rng: rng.choice(THINGS),
    "food": lambda rng: rng.choice(FOODS),
    "time": lambda rng: f"{rng.randint(0, 23):02d}:{rng.choice(('00', '15', '30', '45'))}",
    "minutes": lambda rng: rng.randint(1, 120),
    "price": lambda rng: rng.randint(1, 500),
    "room": lambda rng: rng.choice(
        ("kitchen", "bedroom", "bathroom", "garage", "office", "hall", "garden", "living room")
    ),
    "unit": lambda rng: rng.choice(("celsius", "fahrenheit")),
    "message": lambda rng: rng.choice(
        ("I am late", "see you soon", "happy birthday", "call me back", "dinner is ready", "good luck", "I am home")
    ),
    "expression": lambda rng: (
        f"{rng.randint(2, 9999)}{rng.choice((' + ', ' - ', ' * ', ' / ', '+', '*', '-'))}{rng.randint(2, 9999)}"
    ),
    "query": lambda rng: f"{rng.choice(COLOURS)} {rng.choice(THINGS)}",
    "amount": lambda rng: rng.randint(1, 1000),
    "level": lambda rng: rng.randint(1, 100),
}

_POOL = tuple(
    Parameter(*row)
    for row in (
        ("city", "string", "The city", "in {}"),
        ("day", "string", "The day", "on {}"),
        ("people", "integer", "Number of people", "for {} people"),
        ("count", "integer", "How many", "{} times"),
        ("name", "string", "Name of the person", "for {}"),
        ("recipient", "string", "Who receives it", "to {}"),
        ("color", "string", "The color", "in the color {}"),
        ("item", "string", "The item", "with the {}"),
        ("food", "string", "The food", "with {}"),
        ("time", "string", "The time, HH:MM", "at {}"),
        ("minutes", "integer", "Duration in minutes", "for {} minutes"),
        ("price", "integer", "The highest price", "for at most {}"),
        ("room", "string", "The room", "in the {}"),
    )
)


@dataclass(frozen=True)
class Tool:
    """A function schema with ways to ask for it; ``{parameter}`` marks an argument in a request."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    required: tuple[str, ...]
    requests: tuple[str, ...]
    reply: str

    def schema(self) -> dict[str, Json]:
        properties: dict[str, Json] = {p.name: {"type": p.kind, "description": p.description} for p in self.parameters}
        parameters: dict[str, Json] = {"type": "object", "properties": properties, "required": list(self.required)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def _known(name: str, description: str, parameters: str, requests: tuple[str, ...], reply: str) -> Tool:
    """``parameters`` is ``name:type:description; …``; a trailing ``?`` on the name makes one optional."""
    rows = [tuple(cell.strip() for cell in row.split(":")) for row in parameters.split(";") if row.strip()]
    found = tuple(Parameter(row[0].rstrip("?"), row[1], row[2], "") for row in rows)
    return Tool(name, description, found, tuple(row[0] for row in rows if not row[0].endswith("?")), requests, reply)


_KNOWN: tuple[Tool, ...] = (
    _known(
        "get_weather",
        "Get the current weather in a city",
        "city: string: The city; unit?: string: celsius or fahrenheit",
        (
            "[what is|what's|how is] the weather [like |]in {city}",
            "weather in {city}",
            "is it [raining|sunny|cold|warm] in {city}",
            "tell me the weather [for|in] {city}",
            "what is the weather in {city} in {unit}",
            "how is the weather in {city} in degrees {unit}",
        ),
        "The weather in {city}",
    ),
    _known(
        "get_current_weather",
        "Get the weather at a location",
        "location: string: The location; unit?: string: celsius or fahrenheit",
        (
            "[what is|what's|how is] the weather [like |]in {location}",
            "weather in {location} in {unit}",
            "do I need an umbrella in {location}",
            "what is the temperature in {location} in {unit}",
            "what's the weather like in {location} today",
        ),
        "The weather in {location}",
    ),
    _known(
        "calculator",
        "Evaluate an arithmetic expression",
        "expression: string: The expression",
        (
            "[what is|calculate|compute|work out] {expression}",
            "use the calculator for {expression}",
            "how much is {expression}",
        ),
        "{expression}",
    ),
    _known(
        "calculate",
        "Do arithmetic",
        "expression: string: What to calculate",
        ("[what is|calculate|compute|work out] {expression}", "how much is {expression}", "{expression}"),
        "{expression}",
    ),
    _known(
        "get_time",
        "Get the current time in a city",
        "city: string: The city",
        (
            "what time is it in {city}",
            "[tell me|what is] the time in {city}",
            "current time in {city}",
            "how late is it in {city}",
        ),
        "The time in {city}",
    ),
    _known(
        "web_search",
        "Search the web",
        "query: string: What to search for",
        (
            "search [the web |]for {query}",
            "look up {query}",
            "find [pages about |]{query}",
            "google {query}",
            "search online for a {query}",
        ),
        "The search for {query}",
    ),
    _known(
        "send_message",
        "Send a message to somebody",
        "recipient: string: Who receives it; message: string: The text",
        (
            "send {recipient} the message {message}",
            'tell {recipient} "{message}"',
            "[message|text] {recipient}: {message}",
            "send a message to {recipient} that says {message}",
            'write "{message}" to {recipient}',
        ),
        "The message to {recipient}",
    ),
    _known(
        "set_timer",
        "Start a timer",
        "minutes: integer: Duration in minutes",
        (
            "[set|start] a timer for {minutes} minutes",
            "timer {minutes} minutes",
            "wake me in {minutes} minutes",
            "set a {minutes} minute timer",
        ),
        "The timer of {minutes} minutes",
    ),
    _known(
        "set_alarm",
        "Set an alarm",
        "time: string: The time, HH:MM; day?: string: The day",
        (
            "[set|I need] an alarm [for|at] {time}",
            "wake me [up |]at {time}",
            "wake me at {time} on {day}",
            "alarm for {time} on {day}",
        ),
        "The alarm for {time}",
    ),
    _known(
        "turn_on_light",
        "Turn on the light of a room",
        "room: string: The room; level?: integer: Brightness from 1 to 100",
        (
            "turn on the light in the {room}",
            "light on in the {room}",
            "switch the {room} light on",
            "turn on the {room} light at {level} percent",
            "I need light in the {room}",
        ),
        "The light in the {room}",
    ),
    _known(
        "convert_currency",
        "Convert dollars to euros",
        "amount: integer: Amount in dollars",
        ("convert {amount} dollars to euros", "how many euros are {amount} dollars", "{amount} dollars in euros"),
        "{amount} dollars in euros",
    ),
    _known(
        "book_restaurant",
        "Book a table in a restaurant",
        "city: string: The city; people: integer: Number of people; day?: string: The day",
        (
            "book a table in {city} for {people} people",
            "reserve a table for {people} in {city}",
            "I need a table for {people} people in {city} on {day}",
        ),
        "The table in {city}",
    ),
)


def _made_up(rng: Random) -> Tool:
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"))
    parameters = tuple(rng.sample(_POOL, rng.randint(1, 3)))
    required = tuple(p.name for p in parameters if rng.random() < 0.8)
    request = f"[{verb}|please {verb}|can you {verb}|i want to {verb}|i'd like to {verb}] a {noun} "
    phrases = [p.phrase.replace("{}", f"{{{p.name}}}") for p in parameters]
    rng.shuffle(phrases)
    return Tool(
        name, f"{verb.capitalize()} a {noun}", parameters, required, (request + " ".join(phrases),), f"The {noun}"
    )


def draw_tools(rng: Random) -> list[Tool]:
    """One to four tools; no two share a name, or what they do."""
    known = rng.sample(_KNOWN, rng.randint(0, 2))
    tools = {tool.name.split("_")[-1].rstrip("or"): tool for tool in known}
    while len(tools) < rng.choice((1, 2, 3, 4)) or not tools:
        tool = _made_up(rng)
        tools.setdefault(tool.description, tool)
    found = list(tools.values())
    rng.shuffle(found)
    return found
