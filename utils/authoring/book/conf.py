"""Settings of Sphinx for the book. The theme, its fonts and its search need no network.

Furo is the theme: it reads well on a phone and in the dark, and all that it loads is its own.
"""

import shutil
from importlib.resources import files
from pathlib import Path

from sphinx.application import Sphinx

project = "RLHF from scratch"
html_title = project
language = "en"
extensions = ["myst_nb", "sphinx.ext.mathjax"]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["book.css", "play.css"]
html_js_files = ["book.js", "play.js"]
html_favicon = "static/favicon.svg"
html_copy_source = False
html_use_index = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1d4ed8", "color-brand-content": "#1d4ed8"},
    "dark_css_variables": {"color-brand-primary": "#93b4ff", "color-brand-content": "#93b4ff"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"

myst_enable_extensions = ["dollarmath", "amsmath", "attrs_block"]
myst_dmath_double_inline = True
myst_heading_anchors = 4
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    "file-here": {"url": "{{path}}"},  # a file around dist/book: see pages.Site
}

mathjax_path = "mathjax/tex-chtml.js"
mathjax3_config = {"options": {"enableMenu": False}}  # what the menu offers is not copied

nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the {type}"  # the source of a folded cell, the outputs of a question
nb_code_prompt_hide = "Hide the {type}"

suppress_warnings = ["misc.highlighting_failure"]  # csv, which pygments does not know


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Copy of MathJax, 24 MB in its package, what pages load: the program and its fonts."""
    if error:
        return
    there = Path(str(files("sphinx-mathjax-offline"))) / "static/mathjax"
    here = app.outdir / "_static/mathjax"
    shutil.copytree(there / "output/chtml/fonts", here / "output/chtml/fonts")
    shutil.copy(there / "tex-chtml.js", here)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
