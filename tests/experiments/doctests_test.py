"""Examples in docstrings of experiments/, whose scripts cannot be collected.

Pytest would import all of them, and each defines its own command-line flags.
"""

import doctest
import importlib
import re

import pytest
from helpers.pages import ROOT

MODULES = [
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in sorted((ROOT / "experiments").rglob("*.py"))
  if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)
]


def test_there_are_some():
  assert "experiments.lab.network.results" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_show(name):
  found = doctest.testmod(importlib.import_module(name))
  assert found.attempted and not found.failed
