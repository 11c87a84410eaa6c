"""Sphinx configuration. Build with `python -m sphinx -W -b html docs docs/_build/html`; no network is used."""

from __future__ import annotations

import la_core

project = "Lightning Attention over a state pool"
author = "the la-core contributors"
project_copyright = author
release = version = la_core.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "requirements.txt"]
source_suffix = {".md": "markdown"}

# Docstrings write code in single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = False
# Attributes of a class become fields of its entry: as entries of their own they would be described twice.
napoleon_use_ivar = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"{project} {release}"
