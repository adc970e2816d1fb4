"""Builds the slides of the teaching kit, `dist/slides/index.html`, from their Markdown."""
