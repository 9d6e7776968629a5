"""Imports go one way: this list is the architecture, bottom first."""

import ast
import pathlib

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAYERS = (
  "varying",
  "ordering",
  "cpu_hosts",
  "collectives",
  "matrices",
  "products",
  "orthonormalize",
  "entropy",
  "spectrum",
  "sketch",
  "wire_codes",
  "averages",
  "plan",
  "compiled_cost",
  "cpu_devices",
  "guards",
  "agreement",
  "sentinel",
  "comm_cost",
  "link",
  "advice",
  "ladder",
  "packing",
  "refresh",
  "exchange_state",
  "exchange",
  "error_feedback",
  "factor_wire",
  "low_rank",
  "sparse",
  "entrywise",
  "rank_rule",
  "stages",
  "controller_state",
  "controller",
  "allocation",
  "allocator",
  "policy",
  "telemetry",
  "late_gradients",
  "reducer_state",
  "reducer",
  "arguments",
  "fixed_rank",
  "adaptive_rank",
  "entrywise_methods",
  "stopwatch",
  "link_timing",
  "timing",
  "wrappers",
  "state_sharding",
  "replicas",
  "pipeline",
  "__init__",
)
ALLOWED = {"edgc_jax", "jax", "numpy", "optax"}
COLLECTIVES = {
  "all_gather", "all_to_all", "axis_index", "axis_size", "pcast", "pmax",
  "pmean", "pmin", "ppermute", "psum", "psum_scatter",
}  # fmt: skip
STANDARD = {
  "collections", "dataclasses", "functools", "importlib", "math", "os", "re",
  "sys", "time", "typing", "warnings",
}  # fmt: skip


def imports(path):
  """Full names of what a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


class LayeringTest(parameterized.TestCase):
  def test_the_list_is_complete(self):
    files = {path.stem for path in (ROOT / "edgc_jax").glob("*.py")}
    self.assertEqual(files, set(LAYERS))

  @parameterized.parameters(*LAYERS)
  def test_a_module_imports_only_what_is_below_it(self, module):
    for name in imports(ROOT / "edgc_jax" / f"{module}.py"):
      package, *rest = name.split(".")
      self.assertIn(package, ALLOWED | STANDARD, name)
      self.assertNotIn("_src", rest, "private parts of a library")
      if package == "edgc_jax" and rest and rest[0] in LAYERS:
        self.assertLess(LAYERS.index(rest[0]), LAYERS.index(module), name)

  @parameterized.parameters(*sorted(set(LAYERS) - {"collectives"}))
  def test_collectives_have_one_home(self, module):
    tree = ast.parse((ROOT / "edgc_jax" / f"{module}.py").read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    self.assertEmpty(used & COLLECTIVES)
    path = ROOT / "edgc_jax" / f"{module}.py"
    names = {name.split(".")[-1] for name in imports(path)}
    self.assertEmpty(names & COLLECTIVES)

  def test_nothing_imports_experiments_but_experiments(self):
    for path in (ROOT / "configs").glob("*.py"):
      packages = {name.split(".")[0] for name in imports(path)}
      self.assertLessEqual(packages, {"configs", "ml_collections"})

  @parameterized.parameters("edgc_jax", "experiments")
  def test_modules_stay_small(self, folder):
    for path in (ROOT / folder).rglob("*.py"):
      lines = len(path.read_text().splitlines())
      self.assertLessEqual(lines, 400, path.name)


if __name__ == "__main__":
  absltest.main()
