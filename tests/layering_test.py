"""Holds the one import rule of each package.

A room may import from the rooms on the floors below its own, and from itself.
Rooms on one floor never import each other. In `experiments`, so the trainer and
its commands know nothing of the laboratory.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLOORS = {
  "edgc_jax": (
    "validation", "wire", "leaves", "budget stages", "state", "mesh", "reducer",
    "methods", "extend measure sites", "diagnosis", "__init__", "__main__",
  ),
  "experiments": ("__init__", "trainer", "train_gpt2 advise report", "lab"),
  "experiments/trainer": (
    "__init__", "runtime models data", "tasks", "parallel", "runs", "training",
    "reporting",
  ),
  "experiments/lab": (
    "peers", "__init__", "study benchmarks", "network",
    "planning", "pages",
    "train train_together plan_cluster plan_layout plan_stages run_study",
  ),
}  # fmt: skip
ROOMS = {
  package: {
    room: floor for floor, rooms in enumerate(floors) for room in rooms.split()
  }
  for package, floors in FLOORS.items()
}
ALLOWED = {"edgc_jax", "jax", "numpy", "optax"}
BUCKETS, OPTIONAL = pathlib.Path("sites/bucket.py"), {"fsspec"}
COLLECTIVES = {
  "all_gather", "all_to_all", "axis_index", "axis_size", "pbroadcast", "pcast",
  "pmax", "pmean", "pmin", "ppermute", "pshuffle", "psum", "psum_scatter",
  "pswapaxes", "pvary", "ragged_all_to_all",
}  # fmt: skip
STANDARD = {
  "argparse", "collections", "contextlib", "contextvars", "dataclasses",
  "errno", "functools", "hashlib", "hmac", "importlib", "inspect", "ipaddress",
  "itertools", "json", "logging", "math", "operator", "os", "pathlib",
  "platform", "re", "shutil", "socket", "struct", "sys", "textwrap",
  "threading", "time", "types", "typing", "uuid", "warnings",
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


MODULES = [(package, path) for package in FLOORS for path in files(package)]


def test_files_import_from_below_only():
  """A name that is not in a room comes through the package's `__init__`."""
  offenders = []
  for package, path in MODULES:
    floors, own = ROOMS[package], room_of(path)
    outer = package.split("/")
    for name in imports(ROOT / package / path):
      parts = name.split(".")
      rest = parts[len(outer) :]
      room = rest[0] if rest and rest[0] in floors else "__init__"
      is_below = floors[room] < floors.get(own, -1)
      if parts[: len(outer)] == outer and room != own and not is_below:
        offenders.append(f"{name} in {path}")
    offenders += [] if own in floors else [f"{path} is in no room"]
  assert not offenders


def test_libraries_are_used_by_their_public_parts():
  """Relative imports would hide arrows."""
  assert not [
    f"{name} in {package}/{path}"
    for package, path in MODULES
    for name in imports(ROOT / package / path)
    for first, *_ in [name.split(".")]
    for more in [OPTIONAL if path == BUCKETS else set()]
    if "_src" in name.split(".")
    or not first
    or (package == "edgc_jax" and first not in ALLOWED | STANDARD | more)
  ]


def test_collectives_have_one_home():
  offenders = {}
  for path in set(files("edgc_jax")) - {pathlib.Path("wire/collectives.py")}:
    file = ROOT / "edgc_jax" / path
    nodes = ast.walk(ast.parse(file.read_text()))
    used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    used |= {name.split(".")[-1] for name in imports(file)}
    offenders |= {path: used & COLLECTIVES} if used & COLLECTIVES else {}
  assert not offenders


def test_configurations_import_nothing_but_themselves():
  allowed = {"configs", "ml_collections", "collections", "typing"}
  found = [
    (name, path)
    for path in (ROOT / "configs").rglob("*.py")
    for name in imports(path)
  ]
  assert found
  assert not [x for x in found if x[0].split(".")[0] not in allowed]
