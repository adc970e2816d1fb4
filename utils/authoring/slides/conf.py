"""Settings of Sphinx for the slides. Reveal.js, its theme and its fonts come from sphinx-revealjs.

Equations become MathML when the slides are built, which browsers draw by themselves, with a font
for mathematics (STIX Two) that ziamath brings along. So nothing is fetched when a deck is shown.
"""

from pathlib import Path

import ziamath
from docutils import nodes
from latex2mathml.converter import convert

FONT = Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf"

project = "RLHF from scratch"
language = "en"
root_doc = "index"
extensions = ["myst_parser", "sphinx_revealjs"]
suppress_warnings = ["toc.not_included"]  # the index has plain links
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"

revealjs_html_theme = "revealjs-simple"
revealjs_style_theme = "white"
revealjs_static_path = ["static", str(FONT)]
revealjs_css_files = ["slides.css"]
revealjs_script_plugins = [{"src": "revealjs/plugin/notes/notes.js", "name": "RevealNotes"}]
revealjs_script_conf = {
    "width": 1280,
    "height": 720,
    "margin": 0.05,
    "hash": True,
    "slideNumber": "c/t",
    "transition": "none",
}


def draw_inline(translator, node: nodes.math) -> None:
    """Write an equation within a line, as MathML."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def draw_block(translator, node: nodes.math_block) -> None:
    """Write an equation on a line of its own, as MathML."""
    translator.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (draw_inline, None), (draw_block, None))
