"""The README as a package index shows it; the rest of the build stands in pyproject.toml.

An index has no pages beside the README: links into the repository become their text there, and pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup

text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
text = re.sub(r"!\[[^]]*\]\((?!https://)[^)]*\)\n*|<!--.*?-->\n?", "", text)
text = re.sub(r"\[([^]]+)\]\((?!https://)[^)]*\)", r"\1", text)

setup(long_description=text, long_description_content_type="text/markdown")
