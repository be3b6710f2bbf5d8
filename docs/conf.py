"""The documentation as a site: pages of this folder, and a reference of the public names."""

from __future__ import annotations

from importlib.metadata import version as installed

project = "Shardwright"
version = release = installed("shardwright")
copyright = "Shardwright's authors"  # noqa: A001 - Sphinx's name

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Shardwright {release}"
html_theme_options = {
    name: {"code-font-size": "80%"} for name in ("light_css_variables", "dark_css_variables")
}
html_static_path = ["static"]
html_css_files = ["wide.css"]

myst_heading_anchors = 4  # the anchors that pages link to are those of their headings
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
