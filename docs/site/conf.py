# SPDX-License-Identifier: Apache-2.0
# Sphinx's settings of the documentation site; scripts/site calls it.
import os

from docutils import nodes

project = "Cohort"
author = "The Cohort project"
release = os.environ["COHORT_SITE_VERSION"]
extensions = ["myst_parser", "breathe"]
myst_heading_anchors = 3
breathe_projects = {"cohort": os.environ["COHORT_SITE_XML"]}
breathe_default_project = "cohort"
breathe_default_members = ("members",)
# Each header opens namespace cohort again.
suppress_warnings = ["duplicate_declaration.cpp"]
html_theme = "furo"
html_title = f"Cohort {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]


# scripts/site writes the "." of a designated initializer as a word, for the parser of C++.
def restore_designators(app, doctree):
    for text in list(doctree.findall(nodes.Text)):
        if "designated_" in text:
            text.parent.replace(text, nodes.Text(text.replace("designated_", ".")))


def setup(app):
    app.connect("doctree-read", restore_designators)
