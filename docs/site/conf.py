"""Settings of the site: what Sphinx reads. ``build.py`` calls it."""

import re
from typing import Any

from docutils import nodes
from reference import GROUPS
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.pycode import ModuleAnalyzer

import composable

project = "torch-composable"
version = release = composable.__version__
author = copyright = "the authors of torch-composable"  # noqa: A001  # Sphinx asks for this name
root_doc = "docs/README"
exclude_patterns = ["docs/examples"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 6
myst_enable_extensions = ["html_image"]  # <img> in pages, where a picture has a width
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
# Of the classes above ours nothing is shown: torch's and Python's pages have it.
autodoc_default_options = {
    "members": True,
    "inherited-members": "AnnotatedModule, DTensor, Exception, Joinable, Placement, Policy, object",
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 80
add_module_names = False
smartquotes_action = "D"  # dashes alone
toc_object_entries = False

# The style of torch's pages without its templates: those load scripts of other hosts, and count readers.
html_theme = "pytorch_sphinx_theme2"
html_title = "torch-composable"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "torch-composable"},
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button-field"],
    "article_header_start": ["breadcrumbs"],
    "article_header_end": [],
    "article_footer_items": [],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "use_edit_page_button": False,
    "llm_disabled": True,
    "show_nav_level": 1,
    "navigation_with_keys": False,
}
html_sidebars = {"docs/README": []}

NAMES = {name: f"{group.module}.{name}" for group in GROUPS for name in group.names}
# What functions return or modules are: nobody calls these classes.
NOT_CALLED = {
    *("BackwardSteps", "CommHookHandle", "DDPView", "Difference", "FSDPModule"),
    *("GradientReductionHandle", "RaggedDTensor", "ReductionStats", "ReplicateModule", "SaveHandle", "ShardPlan"),
    *("SavedCheckpoint", "TokenMean", "UnevenInputs", "UnshardHandle"),
}
# What stands for types that are equal in arguments and result.
TYPES = {"ModuleT": "Module | Sequence[Module]", "OptimizerT": "Optimizer"}
# Words that pages use for other things too.
AMBIGUOUS = {"checkpoint", "contract"}
DEFAULTS = {
    "NO_CASTS": "MixedPrecisionPolicy()",
    "NO_OFFLOAD": "OffloadPolicy()",
    "NO_OPTIONS": "HandleOptions()",
    "NO_REPLICATE_OPTIONS": "ReplicateOptions()",
}


def link_names(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """In docstrings, make links of public names and of pages."""
    own = name.rpartition(".")[2]

    def linked(match: re.Match[str]) -> str:
        is_other = match[1] in NAMES and match[1] != own and not match.string[: match.start()].endswith("torch's ")
        return rf":py:obj:`~{NAMES[match[1]]}`\ " if is_other else match[0]

    for number, line in enumerate(lines):
        line = re.sub(r"(?<!`)``(\w+)``(?!`)", linked, line)
        lines[number] = re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`/docs/\1`", line)


def name_defaults(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show default objects by the call that makes such an object, and no arguments of what users do not call."""
    if name.rpartition(".")[2] in NOT_CALLED:
        return "", None
    for constant, call in DEFAULTS.items():
        signature = signature and re.sub(rf"\b{constant}\b", call, signature)
    return signature, returned


def name_types(app: Sphinx, doctree: nodes.document) -> None:
    """Show type variables by the types that they stand for, and classes of ours by their names alone."""
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, nodes.emphasis):
            shown = TYPES.get(text, re.sub(r"\bcomposable\.(?:\w+\.)+(?=\w)", "", text))
            text.parent.replace(text, nodes.Text(shown))


def open_pictures_large(app: Sphinx, doctree: nodes.document) -> None:
    """Let a click on a picture open it alone: Sphinx makes such links of pictures that have a width."""
    for image in doctree.findall(nodes.image):
        if not image.hasattr("width"):
            image["width"] = "100%"


def link_first_mentions(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Let public names lead to the reference, where a section of a page has them first."""
    seen = set()
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext().removesuffix("()")
        if name not in NAMES or name in AMBIGUOUS or docname == f"reference/{name}":
            continue
        around = [literal.parent]
        while around[-1].parent is not None and not isinstance(around[-1], nodes.section):
            around.append(around[-1].parent)
        before = literal.parent.astext().partition(name)[0].rstrip().lower()
        is_taken = any(isinstance(node, nodes.reference | nodes.title) for node in around)
        if is_taken or before.endswith("torch's") or (around[-1], name) in seen:
            continue
        seen.add((around[-1], name))
        link = nodes.reference(internal=True, refuri=app.builder.get_relative_uri(docname, f"reference/{name}"))
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect what is above."""
    # One signature in place of its overloads, which say the same twice.
    analyzer = ModuleAnalyzer.for_module("composable.ground.contract")
    analyzer.analyze()
    analyzer.overloads.clear()
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", link_names)
    app.connect("autodoc-process-signature", name_defaults)
    app.connect("doctree-read", name_types)
    app.connect("doctree-read", open_pictures_large)
    app.connect("doctree-resolved", link_first_mentions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
