"""Charts: well-formed, every point inside its panel, round ticks."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from quire.tools.bench.report import HEIGHT, WIDTH, Line, Panel, svg, ticks


@pytest.mark.parametrize(
    ("highest", "expected"),
    [(10, [0, 2, 4, 6, 8, 10]), (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (11_000, [0, 5000, 10_000, 15_000]), (0, [0, 1])],
)
def test_ticks_are_round_and_reach_the_highest(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == expected


def test_every_line_and_label_is_drawn_inside_the_picture() -> None:
    panels = [
        Panel("<first>", "s", "tokens", [Line("a", [0, 1, 2], [5, 0, 12]), Line("b", [0, 2], [1, 1], steps=True)]),
        Panel("empty", "x", "y", [Line("nothing", [], [])]),
    ]
    text = svg(panels)
    root = ElementTree.fromstring(text)
    assert "&lt;first&gt;" in text
    assert "href" not in text
    said = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"<first>", "s", "tokens", "a", "b", "0", "15", "2"} <= said
    for element in root.iter():
        numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*", element.get("d", ""))]
        assert all(-1 <= number <= max(WIDTH, 2 * HEIGHT) for number in numbers)


def test_higher_values_are_higher_up() -> None:
    text = svg([Panel("", "", "", [Line("", [0, 1], [0, 10])])])
    (path,) = re.findall(r"<path d='M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)'", text)
    x0, y0, x1, y1 = map(float, path)
    assert x0 < x1
    assert y0 > y1
