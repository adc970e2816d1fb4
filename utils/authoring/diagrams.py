"""The diagram of the training loop, one for each chapter: what is new is blue, what is gone red.

`python -m utils.authoring` writes them to chapters/figures as SVG. Each has a light ground of its
own, so that it can be read on a dark page, and a description for those who do not see it.
"""

import itertools
from dataclasses import dataclass
from xml.sax.saxutils import escape

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
    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()  # dropped in an earlier chapter

    def get_look(self, name: str) -> str:
        marked = {"new": self.new, "gone": self.gone, "later": self.later}
        return next((look for look, names in marked.items() if name in names), "known")


STEPS = {1: "sample", 2: "score", 3: "compare", 4: "weigh", 5: "update the policy"}
LOOPS = {
    "ch0_sampling": Loop(
        "Chapter 0: the loop at its plainest, REINFORCE",
        {
            "policy": "the model",
            "reward": "a program",
            "advantage": "reward − baseline",
            "objective": "log-prob × A",
            "reference": "chapter 1",
            "value head": "chapter 2",
        },
        new=("prompts", "policy", "completions", "reward", "advantage", "objective"),
        later=("reference", "value head"),
    ),
    "ch1_lora": Loop(
        "Chapter 1: adapters, and a reference for free",
        {
            "policy": "base + LoRA",
            "reference": "adapters off",
            "advantage": "reward − baseline",
            "objective": "log-prob × A",
            "value head": "chapter 2",
        },
        new=("policy", "reference"),
        later=("value head",),
    ),
    "ch2_ppo": Loop(
        "Chapter 2: PPO",
        {
            "policy": "base + LoRA",
            "reference": "adapters off",
            "value head": "V(s), a baseline",
            "advantage": "GAE, per token",
            "objective": "clip, KL, values",
        },
        new=("value head", "advantage", "objective"),
    ),
    "ch3_grpo": Loop(
        "Chapter 3: GRPO, without the value head",
        {
            "policy": "base + LoRA",
            "completions": "G per prompt",
            "reference": "adapters off",
            "advantage": "within the group",
            "value head": "dropped",
            "objective": "clip, KL",
        },
        new=("completions", "advantage", "objective"),
        gone=("value head",),
    ),
    "ch4_kl": Loop(
        "Chapter 4: how the KL is estimated, and what its gradient does",
        {
            "policy": "base + LoRA",
            "completions": "G per prompt",
            "reference": "k1, k2, k3, k4",
            "advantage": "within the group",
            "objective": "what holds it?",
        },
        new=("reference", "objective"),
        absent=("value head",),
    ),
    "ch5_rlvr": Loop(
        "Chapter 5: rewards that a program verifies, and what came after GRPO",
        {
            "prompts": "with an answer",
            "policy": "base + LoRA",
            "completions": "G per prompt",
            "reward": "a verifier",
            "reference": "often left out",
            "advantage": "which baseline?",
            "objective": "DAPO, GSPO, ...",
        },
        new=("prompts", "reward", "advantage", "objective"),
        absent=("value head",),
    ),
    "ch6_preferences": Loop(
        "Chapter 6: a reward that was learnt from preferences",
        {
            "policy": "base + LoRA",
            "completions": "G, or the picked",
            "reward": "learnt from pairs",
            "reference": "adapters off",
            "advantage": "against the pool",
            "objective": "GRPO, DPO, SFT",
        },
        new=("completions", "reward", "advantage", "objective"),
        absent=("value head",),
    ),
    "ch7_scale": Loop(
        "Chapter 7: the loop on many processes",
        {
            "prompts": "a share each",
            "policy": "on every rank",
            "completions": "own seeds",
            "reference": "refreshed",
            "advantage": "whole groups",
            "objective": "global counts",
        },
        new=("prompts", "policy", "completions", "reference", "objective"),
        absent=("value head",),
    ),
    "ch8_inside": Loop(
        "Chapter 8: what the loop has changed inside the policy",
        {
            "policy": "opened up",
            "completions": "read by position",
            "reference": "adapters off",
        },
        new=("policy", "reference"),
        absent=("value head",),
    ),
}


def draw_loop(chapter: str) -> str:
    """Draw a chapter's loop as an SVG document."""
    loop = LOOPS[chapter]
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
    for number, (x, y) in enumerate([(318, 98), (478, 98), (638, 98), (736, 196), (478, 308)], 1):
        parts.append(_draw_step(x, y, number))
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="Helvetica, Arial, sans-serif">'
    )
    about = f"<title>{escape(loop.title)}</title>\n<desc>{escape(describe_loop(chapter))}</desc>"
    return "\n".join([head, about, ground, *parts, "</svg>\n"])


def describe_loop(chapter: str) -> str:
    """Return in words what a chapter's diagram shows."""
    loop = LOOPS[chapter]
    said = [
        "Prompts go to the policy, which samples completions (1); each gets a reward (2), which "
        "becomes an advantage (3); the objective weighs the log-probs with it (4), and its "
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


def _draw_step(x: int, y: int, number: int) -> str:
    """Draw a step's number in a circle, with its verb above or beside it."""
    right, down = {4: (34, 5), 5: (0, -17)}.get(number, (0, -17))
    label = _draw_text(x + right, y + down, STEPS[number], INK, 13)
    return (
        f'<circle cx="{x}" cy="{y}" r="11" fill="#ffffff" stroke="{INK}" stroke-width="1.4"/>\n'
        f"{_draw_text(x, y + 4.5, str(number), INK, 13, bold=True)}\n{label}"
    )
