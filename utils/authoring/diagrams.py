"""The diagram of the training loop, one for each chapter: what is new is blue, what is gone red.

`python -m utils.authoring` reads them from chapters/source/loops.yaml, and writes them as SVG to
chapters/figures. Each has a light ground of its own, so that it can be read on a dark page, and a
description for those who do not see it.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import yaml

WIDTH, HEIGHT = 800, 330
BOX_WIDTH, BOX_HEIGHT = 124, 58
PLACES = {  # left, top
    "prompts": (16, 110),
    "policy": (176, 110),
    "completions": (336, 110),
    "reward": (496, 110),
    "advantage": (656, 110),
    "value head": (656, 12),
    "reference": (336, 216),
    "objective": (656, 216),
}
STEPS = {  # the circle's middle, and how far right of it and below it the verb stands
    "sample": (318, 98, 0, -17),
    "score": (478, 98, 0, -17),
    "compare": (638, 98, 0, -17),
    "weight": (736, 196, 34, 5),
    "update the policy": (478, 308, 0, -17),
}
INK, PALE, BLUE, RED = "#1f2933", "#9aa5b1", "#1d4ed8", "#c81e1e"
LOOKS = {  # colour of line and text, of the ground, and the line's dashes
    "known": (INK, "#f5f7fa", ""),
    "new": (BLUE, "#dbeafe", ""),
    "gone": (RED, "#fdecec", "5 4"),
    "later": (PALE, "#ffffff", "3 4"),
}


@dataclass(frozen=True)
class Loop:
    """A chapter's loop: what stands in each box, below its name, and which are not as before."""

    title: str
    notes: dict[str, str]
    new: Sequence[str] = ()
    gone: Sequence[str] = ()
    later: Sequence[str] = ()
    absent: Sequence[str] = ()  # dropped in an earlier chapter

    def get_look(self, name: str) -> str:
        looks = ("new", "gone", "later")
        return next((look for look in looks if name in getattr(self, look)), "known")


SOURCE = Path(__file__).parents[2] / "chapters" / "source" / "loops.yaml"


@functools.cache
def read_loop(chapter: str) -> Loop:
    """Read a chapter's loop. Raises ValueError where the source has none, or a wrong one."""
    try:
        return Loop(**yaml.safe_load(SOURCE.read_text(encoding="utf-8"))[chapter])
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"chapters/source/loops.yaml should describe {chapter}: {error}") from None


def draw_loop(chapter: str) -> str:
    """Draw a chapter's loop as an SVG document."""
    loop = read_loop(chapter)
    parts = [_draw_box(name, loop) for name in PLACES if name not in loop.absent]
    colors = {name: LOOKS[loop.get_look(name)][0] for name in PLACES}
    row = list(PLACES)[:5]
    for left, right in itertools.pairwise(row):
        start, end = PLACES[left][0] + BOX_WIDTH, PLACES[right][0]
        parts.append(_draw_arrow([(start, 139), (end, 139)]))
    if "value head" not in loop.absent:
        parts.append(_draw_arrow([(718, 70), (718, 110)], colors["value head"]))
    parts += [
        _draw_arrow([(398, 168), (398, 216)], colors["reference"]),
        _draw_arrow([(718, 168), (718, 216)]),
        _draw_arrow([(460, 245), (656, 245)], colors["reference"]),
        _draw_arrow([(718, 274), (718, 308), (238, 308), (238, 168)]),
        _draw_text(558, 238, "KL", colors["reference"], 13),
    ]
    parts += [_draw_step(n, verb, *at) for n, (verb, at) in enumerate(STEPS.items(), 1)]
    top = 56 if "value head" in loop.absent else 0  # nothing else stands so high
    size, below = f'width="{WIDTH}" height="{HEIGHT - top}"', f'y="{top}" ' if top else ""
    ground = f'<rect {below}{size} rx="10" fill="#ffffff"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top} {WIDTH} {HEIGHT - top}" '
        f'{size} role="img" font-family="Helvetica, Arial, sans-serif">'
    )
    about = f"<title>{escape(loop.title)}</title>\n<desc>{escape(describe_loop(chapter))}</desc>"
    return "\n".join([head, about, ground, *parts, "</svg>\n"])


def describe_loop(chapter: str) -> str:
    """Return in words what a chapter's diagram shows."""
    loop = read_loop(chapter)
    said = [
        "Prompts go to the policy, which samples completions (1); each gets a reward (2), which "
        "becomes an advantage (3); the objective weights the log-probs by it (4), and its "
        "gradient updates the policy (5)."
    ]
    if "reference" not in loop.later:
        said.append("The reference reads them too, and enters the objective through a KL term.")
    if "value head" not in (*loop.gone, *loop.later, *loop.absent):
        said.append("The value head gives the advantage its baseline.")
    said += [f"New here: {', '.join(loop.new)}."] if loop.new else []
    said += [f"Gone: {', '.join(loop.gone)}."] if loop.gone else []
    return " ".join(said)


def _draw_box(name: str, loop: Loop) -> str:
    look = loop.get_look(name)
    color, ground, dashes = LOOKS[look]
    x, y = PLACES[name]
    middle, note = x + BOX_WIDTH / 2, loop.notes.get(name)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    drawn = [
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" '
        f'fill="{ground}" stroke="{color}" stroke-width="1.6"{dash}/>',
        _draw_text(middle, y + (26 if note else 34), name, color, 15, bold=True),
    ]
    if note:
        drawn.append(_draw_text(middle, y + 45, note, color, 12.5))
    if look == "gone":
        right, bottom = x + BOX_WIDTH, y + BOX_HEIGHT
        cross = f"M{x} {y}L{right} {bottom}M{right} {y}L{x} {bottom}"
        drawn.append(f'<path d="{cross}" stroke="{color}" stroke-width="2.2" opacity="0.55"/>')
    return "\n".join(drawn)


def _draw_text(x: float, y: float, text: str, color: str, size: float, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="middle" '
        f'fill="{color}"{weight}>{escape(text)}</text>'
    )


def _draw_arrow(points: list[tuple[int, int]], color: str = INK) -> str:
    """Draw a line through points, with a head at the last."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    path = "M" + "L".join(f"{px} {py}" for px, py in [*points[:-1], (x - 6 * dx, y - 6 * dy)])
    corners = [(x, y), (x - 9 * dx + 5 * dy, y - 9 * dy + 5 * dx)]
    corners.append((x - 9 * dx - 5 * dy, y - 9 * dy - 5 * dx))
    head = " ".join(f"{px},{py}" for px, py in corners)
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>\n'
        f'<polygon points="{head}" fill="{color}"/>'
    )


def _draw_step(number: int, verb: str, x: int, y: int, right: int, down: int) -> str:
    """Draw a step's number in a circle, with its verb above or beside it."""
    label = _draw_text(x + right, y + down, verb, INK, 13)
    return (
        f'<circle cx="{x}" cy="{y}" r="11" fill="#ffffff" stroke="{INK}" stroke-width="1.4"/>\n'
        f"{_draw_text(x, y + 4.5, str(number), INK, 13, bold=True)}\n{label}"
    )
