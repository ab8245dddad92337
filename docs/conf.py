"""Configuration of the documentation site; `make docs` builds it."""

import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

import rein

sys.path.insert(0, str(Path(__file__).parent))

project = "rein"
author = "rein contributors"
copyright = "rein contributors"
version = release = rein.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["options_table"]  # in this folder
exclude_patterns = ["*.py"]

# Docstrings are Google style, and single backticks mark code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Options", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True

# Tutorials are executed while the site is built. An exception in a cell fails the build.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True  # runs of tutorials do not stay in docs/
nb_merge_streams = True

html_theme = "furo"
html_title = "rein"
html_static_path = ["_static"]
html_css_files = ["rein.css"]
html_show_sphinx = False
html_math_renderer = "mathml"


def setup(app: Sphinx) -> None:
    """Write equations as MathML, which browsers draw without a script from the network."""

    def inline(translator: object, node: nodes.math) -> None:
        translator.body.append(convert(node.astext()))
        raise nodes.SkipNode

    def block(translator: object, node: nodes.math_block) -> None:
        translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (inline, None), (block, None))
