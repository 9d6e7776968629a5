"""Holds the one import rule of each package.

A room may import from the rooms on the floors below its own, and from itself.
Rooms on one floor never import each other.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLOORS = {
  "edgc_jax": (
    {"validation"},
    {"wire"},
    {"leaves"},
    {"budget", "stages"},
    {"state"},
    {"mesh"},
    {"reducer"},
    {"methods"},
    {"measure"},
    {"diagnosis"},
    {"__init__"},
    {"__main__"},
  ),
  "experiments": (
    {"runtime", "models", "data", "peers", "__init__"},
    {"tasks"},
    {"parallel"},
    {"runs"},
    {"training"},
    {"reporting"},
    {"study", "benchmarks"},
    {"network"},
    {"planning"},
    {"pages"},
    {
      "train_gpt2",
      "train_together",
      "advise",
      "plan_cluster",
      "plan_layout",
      "plan_stages",
      "run_study",
      "report",
    },
  ),
}
ROOMS = {
  package: {room: floor for floor, rooms in enumerate(floors) for room in rooms}
  for package, floors in FLOORS.items()
}
ALLOWED = {"edgc_jax", "jax", "numpy", "optax"}
COLLECTIVES = {
  "all_gather", "all_to_all", "axis_index", "axis_size", "pbroadcast", "pcast",
  "pmax", "pmean", "pmin", "ppermute", "pshuffle", "psum", "psum_scatter",
  "pswapaxes", "pvary", "ragged_all_to_all",
}  # fmt: skip
STANDARD = {
  "argparse", "collections", "contextlib", "contextvars", "dataclasses",
  "functools", "importlib", "inspect", "ipaddress", "json", "logging", "math",
  "operator", "os", "pathlib", "platform", "re", "socket", "sys", "textwrap",
  "threading", "time", "types", "typing", "warnings",
}  # fmt: skip


def files(package):
  """All modules of a package, as paths from its folder."""
  folder = ROOT / package
  return sorted(path.relative_to(folder) for path in folder.rglob("*.py"))


def room_of(path):
  """The first folder of a path, or its file's name at the top."""
  return path.parts[0].removesuffix(".py")


def imports(path):
  """Full names of what a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      start = "." * node.level + (node.module or "")
      yield from (f"{start}.{alias.name}" for alias in node.names)


def arrows(package, path):
  """The rooms of the same package that a file imports from.

  A name that is not in a room comes through the package's `__init__`.
  """
  for name in imports(ROOT / package / path):
    first, *rest = name.split(".")
    if first == package:
      is_room = rest and rest[0] in ROOMS[package]
      yield rest[0] if is_room else "__init__", name


MODULES = [(package, path) for package in FLOORS for path in files(package)]


def test_files_import_from_below_only():
  for package, path in MODULES:
    own = room_of(path)
    floors = ROOMS[package]
    assert own in floors, path
    for room, name in arrows(package, path):
      assert room == own or floors[room] < floors[own], f"{name} in {path}"


def test_libraries_are_used_by_their_public_parts():
  for package, path in MODULES:
    for name in imports(ROOT / package / path):
      assert "_src" not in name.split("."), path
      assert not name.startswith("."), "relative imports hide arrows"
      if package == "edgc_jax":
        assert name.split(".")[0] in ALLOWED | STANDARD, f"{name} in {path}"


def test_collectives_have_one_home():
  for path in set(files("edgc_jax")) - {pathlib.Path("wire/collectives.py")}:
    file = ROOT / "edgc_jax" / path
    nodes = ast.walk(ast.parse(file.read_text()))
    used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    used |= {name.split(".")[-1] for name in imports(file)}
    assert not used & COLLECTIVES, path


def test_configurations_import_nothing_but_themselves():
  allowed = {"configs", "ml_collections", "collections", "typing"}
  for path in (ROOT / "configs").rglob("*.py"):
    assert {name.split(".")[0] for name in imports(path)} <= allowed, path
