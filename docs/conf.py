"""Configuration of the documentation site; `make docs` builds it."""

import os
import re
import sys
import tomllib
from pathlib import Path

import attrs
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

import rein

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
os.environ["MATPLOTLIBRC"] = str(DOCS / "matplotlibrc")  # read by the kernels that execute the tutorials

project = "rein"
author = "rein contributors"
copyright = "rein contributors"
version = release = rein.__version__
with (DOCS.parent / "pyproject.toml").open("rb") as file:
    repository = tomllib.load(file)["project"]["urls"]["Homepage"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["sphinx_copybutton"]
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
python_maximum_signature_line_length = 100

# Tutorials are executed while the site is built. An exception in a cell fails the build.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True  # runs of tutorials do not stay in docs/
nb_merge_streams = True

html_theme = "furo"
html_title = f"rein {release}"
html_theme_options = {
    "source_repository": repository,
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
}
html_static_path = ["_static"]
html_css_files = ["rein.css"]
html_show_sphinx = False
html_math_renderer = "mathml"
copybutton_selector = "div:not(.output) > div.highlight > pre"


def describe_options(app: Sphinx, what: str, name: str, kind: object, options: object, lines: list[str]) -> None:
    """Add the type to each option of an agent, and write its default as code."""
    if what != "class" or not issubclass(kind, rein.Agent):
        return
    types = {field.name: field.type for field in attrs.fields(kind)}
    listed = lines.index("Options:") if "Options:" in lines else len(lines)
    for row in range(listed, len(lines)):
        lines[row] = re.sub(r"^ {4}(\w+):", lambda found: f"    {found[1]} ({types[found[1]]}):", lines[row])
        lines[row] = re.sub(r"Default: (.+)$", r"Default: ``\1``", lines[row])


def shorten_signature(
    app: Sphinx, what: str, name: str, kind: type, options: object, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Write the defaults of attrs classes, whose source is generated, and leave the options of agents to their list."""
    if what != "class" or not signature or not attrs.has(kind):
        return None
    if issubclass(kind, rein.Agent):
        return re.sub(r", \*, .*", ", **options)", signature), None
    defaults = {field.name: field.default for field in attrs.fields(kind)}
    given = [part for part in signature.strip("()").split(", ") if not re.search(r"=NOTHING|attr_dict\['_", part)]
    shown = re.sub(r"attr_dict\['(\w+)'\]\.default", lambda found: repr(defaults[found[1]]), ", ".join(given))
    return f"({shown})", None


def setup(app: Sphinx) -> None:
    """Write equations as MathML, which browsers draw without a script from the network. Change what autodoc shows."""

    def inline(translator: object, node: nodes.math) -> None:
        translator.body.append(convert(node.astext()))
        raise nodes.SkipNode

    def block(translator: object, node: nodes.math_block) -> None:
        parts = re.split(r"\\q?quad", node.astext())  # each starts a line if the window is narrow
        drawn = "".join(convert(part.strip(), display="block") for part in parts)
        translator.body.append(f'<div class="math">{drawn}</div>')
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("autodoc-process-docstring", describe_options, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten_signature)
