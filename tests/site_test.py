"""The documentation site builds strictly, and is whole."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

import edgc_jax
from experiments.lab.pages import site

# Only `make test-slow` installs the generator of the site.
griffe = pytest.importorskip("griffe")
docstrings = pytest.importorskip("experiments.lab.pages.docstrings")
pytestmark = pytest.mark.slow

TOML = """\
[project]
site_name = "made up"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
nav = [{ "Home" = "README.md" }, { "Page" = "docs/page.md" }]
"""


class Links(HTMLParser):
  """What a page of the site fetches, and where it links to."""

  def __init__(self, text):
    super().__init__()
    self.fetched, self.linked, self.ids = [], [], set()
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    of = dict(attrs)
    self.ids.add(of.get("id"))
    fetched = of.get("src") or (tag == "link" and of.get("href"))
    if fetched:
      self.fetched.append(fetched)
    elif of.get("href"):
      self.linked.append(of["href"])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  """Returns the links of each page of the project's own site."""
  output = tmp_path_factory.mktemp("site") / "site"
  site.build(output)
  return {
    file: Links(file.read_text())
    for file in output.rglob("*.html")
    if file.name != "404.html"  # it has no address of its own
  }


def test_every_public_name_is_in_the_reference(pages):
  (reference,) = [p for p in pages if p.name == "reference.html"]
  for name in edgc_jax.__all__:
    assert f"edgc_jax.{name}" in pages[reference].ids


def test_the_site_fetches_nothing_from_elsewhere_and_lacks_no_file(pages):
  for page, links in pages.items():
    assert not [f for f in links.fetched if re.match(r"\w+:|//", f)], page
    own = [f for f in links.linked if not re.match(r"\w+:|//", f)]
    for target in (*links.fetched, *own):
      path = re.split("[?#]", target)[0]
      assert (page.parent / path).exists(), f"{target} in {page}"


@pytest.fixture
def root(tmp_path):
  """A small repository."""
  (tmp_path / "docs/assets").mkdir(parents=True)
  (tmp_path / site.CONFIG).write_text(TOML)
  (tmp_path / "README.md").write_text("# Home\n\n[a page](docs/page.md#part)\n")
  (tmp_path / "docs/page.md").write_text(
    "# Page\n\n## Part\n\n[code](../code.py), ![](dot.png), [](#part)\n"
  )
  (tmp_path / "code.py").write_text("x = 1\n")
  shutil.copy(site.ROOT / "results/figures/network-times.png",
              tmp_path / "docs/dot.png")  # fmt: skip
  return tmp_path


def test_a_broken_anchor_fails_the_build_and_keeps_the_old_site(root):
  output = root / "site"
  site.build(output, root)
  code = re.sub(r"<[^>]*>", "", (output / "code.py.html").read_text())
  assert "x = 1" in code
  assert (output / "docs/dot.png").exists()
  (root / "README.md").write_text("[a page](docs/page.md#nowhere)\n")
  with pytest.raises(subprocess.CalledProcessError):
    site.build(output, root)
  for other in (root, root / "docs"):  # no site, and kept
    with pytest.raises(ValueError, match="`--site` must be a new folder"):
      site.build(other, root)
  assert (root / "docs/page.md").exists()
  assert "docs/page.html#part" in (output / "index.html").read_text()


def test_linked_files_are_gathered_and_unknown_ones_refused(root):
  pages = {"README.md", "docs/page.md"}
  site.gather(root, pages, root / "all")
  text = (root / "all/docs/page.md").read_text()
  assert "(../code.py.md), ![](dot.png), [](#part)" in text
  assert "~~~~py\nx = 1\n" in (root / "all/code.py.md").read_text()

  with pytest.raises(ValueError, match=r"lacks docs/page\.md; add them"):
    site.gather(root, {"README.md"}, root / "all")
  (root / "MORE.md").touch()
  for text, error, message in (
    ("[more](MORE.md)", ValueError, r"add MORE\.md there"),
    ("[none](none.py)", FileNotFoundError, r"`none\.py` in README\.md"),
  ):
    (root / "README.md").write_text(text)
    with pytest.raises(error, match=message):
      site.gather(root, pages, root / "all")


def test_formulas_and_doctests_become_blocks_of_code():
  docstring = (
    "Adds.\n\n  c = a + b\n    = b + a\n\nArgs:\n  a, b: Terms.\n\n>>> 1 + 1\n2"
  )
  assert docstrings.to_markdown(docstring) == (
    "Adds.\n\n    c = a + b\n      = b + a\n\nArgs:\n  a: Terms.\n  b: Terms."
    "\n\n```pycon\n>>> 1 + 1\n2\n```"
  )


def test_a_public_name_has_a_docstring_and_is_told_from_its_file(tmp_path):
  (tmp_path / "made_up").mkdir()
  (tmp_path / "made_up/__init__.py").write_text(
    "from made_up.add import add\n__all__ = ['add']\n"
  )

  def load(body):
    text = f'"""A file."""\n\ndef add():\n  {body}\n'
    (tmp_path / "made_up/add.py").write_text(text)
    extensions = griffe.load_extensions(docstrings.Docstrings)
    return griffe.load(
      "made_up", search_paths=[tmp_path], extensions=extensions
    )

  add = load('"""Adds."""')["add"]
  assert add.is_function and add.docstring.value == "Adds."
  with pytest.raises(ValueError, match="`add` must have a docstring"):
    load("pass")
