"""Sites that train together through a folder, and what may go wrong."""

import collections
import concurrent.futures
import contextlib
import errno
import pathlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.site_runs import (
  QUICK,
  impatient,
  moved,
  require_all_return,
  require_equal,
  sites,
  together,
  wait_until,
  zeros,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.sites import bucket, payload, run
from edgc_jax.sites import site as site_module
from edgc_jax.sites.run import SiteError


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
  monkeypatch.setattr(bucket.Folder, "poll", 0.002)
  monkeypatch.setattr(bucket, "_FIRST", 0.002)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.4, 0.9)])
def test_dense_sites_are_local_steps(tmp_path, lr, momentum):
  """With everyone there, in float32, and as optax's outer SGD."""
  trained = sites(tmp_path, lr=lr, momentum=momentum)
  outer = optax.chain(
    edgc_jax.allreduce("data"),
    optax.sgd(lr, momentum or None, nesterov=True),
  )
  tx = edgc_jax.local_steps(optax.sgd(1.0), outer, 1, "data")
  names = [x.site.name for x in trained]

  def grads_of(t):
    each = [
      jax.tree.map(lambda x: -x, moved(zeros(), [t, *name.encode()]))
      for name in names
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)

  def step(grads, state, params):
    local = edgc_jax.local_params(params, state)
    updates, state = tx.update(grads, state, params, local_params=local)
    return optax.apply_updates(params, updates), state

  step = jax.jit(
    jax.vmap(step, (0, 0, 0), axis_name="data", axis_size=len(names))
  )
  params = jax.tree.map(lambda x: jnp.stack([x] * 3), zeros())
  state = jax.vmap(tx.init, axis_name="data")(params)
  for t in range(4):
    params, state = step(grads_of(t), state, params)
  together(*(lambda x=x: x.steps_of(4) for x in trained))
  require_equal(*trained)
  for name, x in trained[0].params.items():
    np.testing.assert_allclose(x, params[name][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  "code", [{"density": 1 / 64, "bits": 2}, {"density": None, "bits": 2},
           {"density": None, "bits": 4}, {"density": None, "bits": 8}],
)  # fmt: skip
def test_common_parameters_are_equal_after_every_round(tmp_path, code):
  trained = sites(tmp_path, **code)
  for _ in range(3):
    rounds = together(*(x.step for x in trained))
    require_equal(*trained)
    assert all(r.members == ("a", "b", "c") for r in rounds)
    size = trained[0].site._layout.num_bytes
    for r in rounds:
      assert size < r.sent < size + 1000 and r.received == 2 * r.sent


def test_a_lone_site_loses_nothing_but_what_its_residual_keeps(tmp_path):
  (alone,) = sites(tmp_path, "a", density=None, bits=2)
  own = zeros()
  for t in range(5):
    own = moved(own, [t, *b"a"])
    alone.step()
  total = jax.tree.map(
    lambda x, kept: np.asarray(x) - kept,
    alone.params,
    dict(zip(("b", "w"), alone.site._residual, strict=True)),
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), total, own
  )


def test_a_site_that_is_late_keeps_its_change(tmp_path):
  """It is in no manifest; all of its change is in the next one."""
  a, b = sites(tmp_path, "ab")
  with impatient(a):
    a.step()
  assert a.site.last.late == ("b",)
  before = jax.tree.map(np.asarray, a.params)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    late = pool.submit(b.step)
    wait_until((tmp_path / "rounds/1/sites/b").exists, late)
    assert a.step().number == 1 == late.result().number
  require_equal(a, b)
  # What b has moved in round 0, and a in round 1.
  own, other = moved(zeros(), [0, *b"b"]), moved(zeros(), [1, *b"a"])
  jax.tree.map(
    lambda x, *y: np.testing.assert_allclose(x, sum(y), atol=1e-5),
    a.params, before, *(jax.tree.map(lambda x: x / 2, y) for y in (own, other)),
  )  # fmt: skip


@pytest.mark.parametrize("rounds", [1, 5, 50])
def test_a_site_returns(tmp_path, rounds):
  """The process that was away, and a new one of the same name."""
  a, b, c = sites(tmp_path, checkpoint_every=4)
  together(a.step, b.step, c.step)
  with impatient(a):
    a.step()
  if rounds > 1:
    require_all_return(a, b)
  while a.site.round <= rounds:
    together(a.step, b.step)
  (again,) = sites(tmp_path, "c", checkpoint_every=4)
  assert again.hash == a.hash
  jax.tree.map(np.testing.assert_array_equal, again.params, a.params)
  with pytest.raises(SiteError, match=r"`name` must be of one process.*'c'"):
    c.step()
  require_all_return(a, b, again)
  kept = sorted(int(x.name) for x in (tmp_path / "checkpoints").iterdir())
  assert len(kept) <= 2
  assert min(int(x.name) for x in (tmp_path / "rounds").iterdir()) >= kept[0]


@pytest.mark.parametrize("rounds", [1, 5, 20])
def test_a_stalled_site_goes_on(tmp_path, rounds):
  """With the round that is open when it comes, which waits for it."""
  a, b = sites(tmp_path, "ab", checkpoint_every=4)
  together(a.step, b.step)
  with impatient(a):
    a.steps_of(rounds)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    late = pool.submit(b.step)
    wait_until((tmp_path / f"rounds/{a.site.round}/sites/b").exists, late)
    a.step()  # after its own steps
  assert late.result().members == ("a", "b")
  together(a.step, b.step)
  assert a.site.last.members == ("a", "b")
  require_equal(a, b)


def test_a_late_site_does_not_decide_at_once(tmp_path):
  """The others are within their steps, for as long as it was away."""
  a, b = sites(tmp_path, "ab")
  together(a.step, b.step)
  with impatient(a):
    a.step()
  b.site._patience = 0.5
  b.site._ended -= 60.0  # so long ago, of which it waits ten times 0.5 s
  with concurrent.futures.ThreadPoolExecutor() as pool:
    late = pool.submit(b.step)
    wait_until((tmp_path / f"rounds/{a.site.round}/sites/b").exists, late)
    time.sleep(0.7)
    assert not late.done()
    assert a.step().members == ("a", "b") == late.result().members
  require_equal(a, b)


def test_a_new_site_joins(tmp_path):
  a, b = sites(tmp_path, "ab")
  for _ in range(3):
    together(a.step, b.step)
  (new,) = sites(tmp_path, "n")
  assert new.site.round == 3 and new.hash == a.hash
  together(a.step, b.step, lambda: (time.sleep(0.3), new.step()))
  assert a.site.last.members == ("a", "b", "n")
  require_equal(a, b, new)


def test_who_leaves_is_not_waited_for(tmp_path):
  a, b = sites(tmp_path, "ab")
  together(a.step, b.step)
  b.site.leave()
  assert a.step().late == () and a.site.last.members == ("a",)


def test_a_site_waits_for_others(tmp_path, caplog, monkeypatch):
  """At least so many sites make a round, and it says for what it waits."""
  monkeypatch.setattr(site_module, "_QUIET", 0.1)
  a, b = sites(tmp_path, "ab", least=2, patience=0.01)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    waiting = pool.submit(a.step)
    expected = "site a waits in round 0 for b, as long as it takes"
    wait_until(lambda: expected in caplog.text, waiting)
    assert not waiting.done()
    b.step()
    assert waiting.result().members == ("a", "b")


def test_a_change_is_downloaded_once(tmp_path, monkeypatch):
  """Links are slow: the check of a change and the round share one read."""
  trained, found = sites(tmp_path), []
  read = bucket.Folder.read

  def counted(folder, path):
    found.append(path)
    return read(folder, path)

  monkeypatch.setattr(bucket.Folder, "read", counted)
  for t in range(3):
    together(*(x.step for x in trained))
    require_equal(*trained)
    names = [path for path in found if f"rounds/{t}/sites/" in path]
    assert collections.Counter(names) == {
      f"rounds/{t}/sites/{name}": 2 for name in "abc"
    }, "by each of the other two"


def test_the_first_manifest_decides(tmp_path):
  a, b = sites(tmp_path, "ab")
  run = b.site._run
  data = run.framed_change("b", "p", 1.0, run._layout.encode(run.common))
  assert run.add("b", data) and run.add("b", data)
  assert not run.add("b", data + b"x"), "another change of the same name"
  assert run.decide({"b": data}) and not run.decide({})
  with impatient(a):
    assert a.step().number == 1, "the next round"
  assert run.apply().members == ("b",) and run.apply().members == ("a",)
  assert a.hash == run.hash


class Killed(BaseException):
  """Ends a site in the middle of a round, as SIGKILL does."""


@contextlib.contextmanager
def killed_at(site, call):
  """Has a site's bucket fail for good, from its call of this number on."""
  real, left = site.site._bucket, [call]

  class Dying:
    poll = real.poll

    def __getattr__(self, name):
      left[0] -= 1
      if left[0] < 0:
        raise Killed
      return getattr(real, name)

  dying = Dying()
  site.site._bucket = site.site._run._bucket = dying
  yield lambda: left[0]


def test_a_site_is_killed_at_every_step_of_a_round(tmp_path):
  """And started again while another one waits: all are equal."""
  for call in range(100):
    folder, is_killed = tmp_path / str(call), False
    a, b = sites(folder, "ab", checkpoint_every=1)
    together(a.step, b.step)
    with (
      killed_at(a, call) as calls_left,
      concurrent.futures.ThreadPoolExecutor() as pool,
    ):
      waiting = pool.submit(b.steps_to, 4)
      # So a does not call the bucket as often as b takes long.
      wait_until((folder / "rounds/1/sites/b").exists, waiting)
      try:
        a.step()
      except Killed:
        is_killed = True
      (a,) = sites(folder, "a", checkpoint_every=1)
      a.steps_to(4)
      waiting.result()
    assert b.site.last.members == ("a", "b")
    require_equal(a, b)
    if not is_killed:
      assert calls_left() >= 0
      break
  assert 10 < call < 99


def test_a_file_is_never_half_there(tmp_path, monkeypatch):
  folder = bucket.Folder(tmp_path)

  def killed(*_):
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr("os.link", killed)
    with pytest.raises(Killed):
      folder.create("x/one", b"data")
  assert folder.sizes("x") == {}
  folder.create("x/one", b"data")
  with pytest.raises(FileExistsError):
    folder.create("x/one", b"other")
  assert folder.read("x/one") == b"data" and folder.sizes("x") == {"one": 4}
  folder.remove("x")
  assert not (tmp_path / "x").exists()


def damaged(kind, data):
  """Bytes of a change that no site may use."""
  if kind == "truncated":
    return data[: len(data) // 2]
  if kind == "flipped":
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]
  if kind == "foreign":
    return b"not of a site"
  if kind == "oversized":
    return data + b"0" * (2 * payload.MOST_HEADER)
  header, body = payload.unframed(data, None)
  if kind == "of another round":
    header["round"] += 1
  if kind == "infinite":
    body = np.full(len(body) // 4, np.inf, np.float32).tobytes()
  if kind == "weightless":
    header["weight"] = -1
  return payload.framed(header, body, None)


@pytest.mark.parametrize(
  "kind", ["truncated", "flipped", "foreign", "oversized", "of another round",
           "infinite", "weightless"],
)  # fmt: skip
@pytest.mark.parametrize("is_named", [False, True])
def test_a_damaged_change_is_refused_by_all(tmp_path, kind, is_named, caplog):
  """Whether or not somebody names it in a manifest."""
  a, b, bad = sites(tmp_path, ("a", "b", "bad"))
  run = bad.site._run
  data = run.framed_change("bad", "p", 1.0, run._layout.encode(run.common))
  data = damaged(kind, data)
  run.add("bad", data)
  if is_named:
    changes = {"bad": data}
    for each in (a, b):  # they write theirs, and bad decides
      own = moved(zeros(), [0, *each.site.name.encode()])
      body = run._layout.encode([-np.asarray(x) for x in own.values()])
      change = run.framed_change(each.site.name, "p", 1.0, body)
      changes[each.site.name] = change
      run.add(each.site.name, change)
    assert run.decide(changes)
    found = [x.site._run.apply() for x in (a, b)]
    assert found[0] == found[1] and set(found[0].refused) == {"bad"}
  else:
    found = together(a.step, b.step)
    assert "round 0 refuses site 'bad'" in caplog.text
  assert all(x.members == ("a", "b") for x in found)
  assert a.hash == b.hash


def test_a_huge_change_is_refused_and_halved(tmp_path, caplog):
  a, b, c = sites(tmp_path, most_norm=5.0)
  params = jax.tree.map(lambda x: x - 1000, c.params)
  together(a.step, b.step, lambda: c.site.exchange(params))
  assert a.site.last.members == ("a", "b")
  assert a.site.last.refused == {"c": "a norm above 5 medians"}
  assert "change of site c is refused by all sites" in caplog.text
  assert all((x == 500).all() for x in c.site._residual)


def test_a_huge_weight_is_lowered(tmp_path):
  a, b, c = sites(tmp_path, most_norm=2.0)
  together(a.step, b.step, lambda: c.step(weight=100.0))
  assert a.site.last.members == ("a", "b", "c")
  own = [np.asarray(moved(zeros(), [0, x])["b"]) for x in b"abc"]
  np.testing.assert_allclose(
    a.params["b"], (own[0] + own[1] + 2 * own[2]) / 4, atol=1e-5
  )


@pytest.mark.parametrize("every", [1, 1000])
def test_a_change_counts_once_though_its_site_does_not_see_it(tmp_path, every):
  """It was in a round, whether or not the round is still there."""
  a, b = sites(tmp_path, "ab", checkpoint_every=every)
  run, uploaded = b.site._run, []
  own = moved(b.params, 1)
  apply, run.apply = run.apply, lambda: (_ for _ in ()).throw(OSError("away"))
  with concurrent.futures.ThreadPoolExecutor() as pool:
    failing = pool.submit(b.site.exchange, own)
    uploaded.append(a.step().members)
    with pytest.raises(OSError, match="away"):
      failing.result()
  assert uploaded == [("a", "b")]
  run.apply = apply
  with impatient(a):
    a.steps_of(3)
  before = jax.tree.map(np.asarray, a.params)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    back = pool.submit(b.site.exchange, own)
    wait_until((tmp_path / f"rounds/{a.site.round}/sites/b").exists, back)
    params = a.site.exchange(a.params)
  jax.tree.map(np.testing.assert_array_equal, back.result(), params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), params, before
  )
  assert all(abs(kept).max() < 1e-4 for kept in b.site._residual)


def test_leaves_in_another_order_are_refused(tmp_path):
  """They would be taken for each other."""
  leaves = {"u": jnp.zeros((3, 4)), "v": jnp.zeros((3, 4))}
  edgc_jax.Site(tmp_path, "a", **QUICK).join(leaves)
  other = collections.OrderedDict(v=leaves["v"], u=leaves["u"])
  with pytest.raises(ValueError, match="`params` must be those of the run"):
    edgc_jax.Site(tmp_path, "b", **QUICK).join(other)


def test_refused_objects_hold_up_nobody(tmp_path):
  """Not even a site whose own name somebody else has used."""
  a, b = sites(tmp_path, "ab", least=2)
  run = b.site._run
  run._set([x + 1 for x in run.common], run._trace)
  require_all_return(a, b)
  (alone,) = sites(tmp_path / "alone", "a")
  alone.site._run.add("a", b"x")
  assert alone.step().members == ()
  assert alone.step().members == ("a",)


def test_a_change_that_was_checked_counts_only_as_its_bytes(tmp_path):
  """An older change of the same name was checked, and is gone since."""
  layout = payload.Layout({"w": (4,)}, None, 32)
  a, b = (
    run.Run(
      bucket.open_bucket(tmp_path), str(tmp_path), layout,
      run.Rule(1.0, 0.0, 10.0), None, [np.zeros(4, np.float32)],
    )
    for _ in range(2)
  )  # fmt: skip
  old, new, other = (
    a.framed_change(name, "process", weight, layout.encode([np.full(4, x)]))
    for name, weight, x in (("a", 5.0, 1.0), ("a", 1.0, 2.0), ("b", 1.0, 0.0))
  )
  assert b.add("a", old) and b.add("b", other) and not a.add("a", new)
  for name, size in a.changes().items():
    assert a.read_change(name, size)
  (tmp_path / "rounds" / "0" / "sites" / "a").unlink()
  assert a.add("a", new) and a.decide({"a": new, "b": other})
  a.apply()
  b.catch_up()
  np.testing.assert_array_equal(a.common[0], np.full(4, -1.0))
  assert a.hash == b.hash


def test_links_are_not_followed(tmp_path):
  (a,) = sites(tmp_path / "run", "a", checkpoint_every=1)
  victim = tmp_path / "victim"
  victim.mkdir()
  (victim / "precious").write_text("data")
  a.step()
  (tmp_path / "run/rounds/7").symlink_to(victim)
  (tmp_path / "run/checkpoints/0").unlink()
  (tmp_path / "run/checkpoints/0").symlink_to(victim)
  a.steps_of(9)
  a.site._bucket.remove(["rounds/7", "checkpoints/0"])
  assert (victim / "precious").read_text() == "data"


def test_foreign_names_and_headers(tmp_path):
  """Nothing that a stranger writes raises another error."""
  a, b = sites(tmp_path, "ab")
  for place in ("checkpoints/\u00b2", "checkpoints/9", "sites/x.\u00b2.y",
                "sites/odd", "rounds/\u00b2/manifest"):  # fmt: skip
    (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / place).write_bytes(b"junk")
  run = b.site._run
  header = run._header("change") | {"name": "x", "common": run.hash}
  body = run._layout.encode(run.common)
  for i, weight in enumerate((10**400, None, "1", float("nan"))):
    data = payload.framed({**header, "weight": weight}, body, None)
    run.add("x" + str(i), data)
  run.add("x", payload.framed({**header, "weight": 10**400}, body, None))
  together(a.step, b.step)
  assert a.site.last.members == ("a", "b")
  require_equal(a, b)
  (new,) = sites(tmp_path, "n")
  assert new.hash == a.hash


@pytest.mark.parametrize(
  "wrong", [{"sites": []}, {"sites": {"a/b": "x"}}, {"common": None},
            {"sites": {"gone": "0" * 64}}],
)  # fmt: skip
def test_a_wrong_manifest_names_itself(tmp_path, wrong):
  (a,) = sites(tmp_path, "a")
  run = a.site._run
  header = run._header("manifest") | {"common": run.hash, "sites": {}} | wrong
  run._bucket.create("rounds/0/manifest", payload.framed(header, b"", None))
  with pytest.raises(SiteError, match=r"rounds/0.* must "):
    a.step()


def test_a_cut_checkpoint_of_a_writer_is_left_out(tmp_path, caplog):
  (a,) = sites(tmp_path, "a", checkpoint_every=2)
  a.steps_of(5)
  run = a.site._run
  header = run._header("checkpoint") | {"about": run._about, "round": 7}
  for more in ({}, {"members": ["a"], "counted": {}}):
    data = payload.framed(header | more, b"short", None)
    (tmp_path / "checkpoints/7").write_bytes(data)
    (again,) = sites(tmp_path, "a", checkpoint_every=2)
    assert again.hash == a.hash
  assert "of round 7 (" in caplog.text


def test_a_site_with_a_slow_uplink_is_waited_for(tmp_path):
  """It says that it comes before it uploads."""
  a, b = sites(tmp_path, "ab")
  together(a.step, b.step)
  with impatient(a):
    a.step()
  add, uploads = b.site._run.add, threading.Event()
  b.site._run.add = lambda *x: (uploads.set(), time.sleep(0.3), add(*x))[2]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    late = pool.submit(b.step)
    wait_until(uploads.is_set, late)
    assert a.step().members == ("a", "b") == late.result().members


def test_an_exchange_outlives_a_signal(tmp_path, monkeypatch):
  a, b = sites(tmp_path, "ab")
  a.site.begin(moved(a.params, 1))
  with monkeypatch.context() as patch:
    patch.setattr(
      a.site._flight, "join", lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
      a.site.finish(a.params)
  with pytest.raises(SiteError, match="the exchange in flight"):
    a.site.begin(a.params)
  b.step()
  a.site.finish(a.params)
  assert a.site.last.members == ("a", "b")


def test_sites_of_one_key(tmp_path):
  a, b = sites(tmp_path, "ab", key=b"secret")
  together(a.step, b.step)
  require_equal(a, b)
  for key in (None, b"other"):
    with pytest.raises(SiteError, match="give the `key` of the run"):
      sites(tmp_path, "c", key=key)


@pytest.mark.parametrize(
  "options", [{"lr": 0.5}, {"bits": 4}, {"most_norm": 3.0}, {"momentum": 0.5}]
)
def test_other_options_are_refused(tmp_path, options):
  sites(tmp_path, "a")
  ((name, value),) = options.items()
  match = rf"`{name}` must be that of the run in .*, got {value}"
  with pytest.raises(ValueError, match=match):
    sites(tmp_path, "b", **options)


def test_another_model_is_refused(tmp_path):
  sites(tmp_path, "a")
  site = edgc_jax.Site(tmp_path, "b", **QUICK)
  with pytest.raises(ValueError, match="`params` must be those of the run"):
    site.join({"w": jnp.zeros((40, 51))})


def test_a_site_with_other_parameters_loads_the_checkpoint(tmp_path, caplog):
  """A machine that computes wrongly goes on with what all others have."""
  a, b, c = sites(tmp_path)
  together(a.step, b.step, c.step)
  run = c.site._run
  run._set([x + 1 for x in run.common], run._trace)
  together(a.step, b.step, c.step)
  assert "parameters of round 1 were wrong here" in caplog.text
  assert a.hash == b.hash
  require_all_return(a, b, c)


def test_a_wrong_site_that_decides_does_not_lead(tmp_path):
  """Its manifest names parameters that nobody else has."""
  a, b = sites(tmp_path, "ab")
  together(a.step, b.step)
  run = b.site._run
  run._set([x + 1 for x in run.common], run._trace)
  with impatient(b):
    assert b.step().members == ("b",)
  assert a.step().members == ("a",) and a.hash != b.hash
  require_all_return(a, b)


def test_a_damaged_manifest_stops_the_run(tmp_path):
  (a,) = sites(tmp_path, "a")
  a.site._run._bucket.create("rounds/0/manifest", b"nonsense")
  with pytest.raises(SiteError, match="rounds/0/manifest must be the manifest"):
    a.step()
  (tmp_path / "rounds/0/manifest").unlink()
  (a,) = sites(tmp_path, "a")
  assert a.step().members == ("a",)


def test_a_change_that_a_manifest_names_must_stay(tmp_path):
  a, b = sites(tmp_path, "ab")
  with impatient(a):
    a.step()
  (tmp_path / "rounds/0/sites/a").write_bytes(b"other")
  with pytest.raises(SiteError, match="must be the object that the manifest"):
    b.step()


def test_a_damaged_checkpoint_is_left_out(tmp_path, caplog):
  (a,) = sites(tmp_path, "a", checkpoint_every=2)
  a.steps_of(5)
  newest = tmp_path / "checkpoints/4"
  newest.write_bytes(newest.read_bytes()[:-1])
  (again,) = sites(tmp_path, "a", checkpoint_every=2)
  assert again.hash == a.hash
  assert "checkpoint the one of round 4 (a body that was cut" in caplog.text


class Failing:
  """A folder that fails until it is back."""

  def __init__(self, folder, error):
    self._folder, self.poll = folder, folder.poll
    self.back, self._error = threading.Event(), error

  def __getattr__(self, name):
    if not self.back.is_set():
      raise self._error
    return getattr(self._folder, name)


@pytest.mark.parametrize(
  "error", [ConnectionError("away"), OSError(errno.ENOSPC, "disk full")]
)
def test_a_bucket_that_is_away_is_tried_again(tmp_path, error, caplog):
  """And training goes on beside it."""
  (a,) = sites(tmp_path, "a")
  a.step()
  own = moved(a.params, 7)
  failing = a.site._bucket._bucket = Failing(a.site._bucket._bucket, error)
  a.site.begin(own)
  later = own
  for seed in range(10):
    later = moved(later, seed)
    assert not a.site.is_ready()
  wait_until(lambda: "failed and is tried again" in caplog.text)
  failing.back.set()
  wait_until(a.site.is_ready)
  params = a.site.finish(later)
  assert a.site.last.members == ("a",)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), params, later
  )


def test_a_bucket_that_stays_away_ends_the_run(tmp_path, monkeypatch):
  monkeypatch.setattr(bucket, "_IN_ALL", 0.05)
  (a,) = sites(tmp_path, "a")
  a.site._bucket._bucket = Failing(a.site._bucket._bucket, OSError("gone"))
  with pytest.raises(OSError, match="gone"):
    a.step()


def test_what_moved_meanwhile_is_kept_and_sent_once(tmp_path):
  """Rounds beside steps: the sum of all moves arrives, none of it twice."""
  a, b = sites(tmp_path, "ab")
  total = {name: np.zeros(x.shape) for name, x in zeros().items()}

  def run(each):
    params, seed = each.params, 0
    for t in range(4):
      for _ in range(2):
        seed += 1
        new = moved(params, [seed, *each.site.name.encode()])
        for name in total if t < 3 else ():
          total[name] += np.asarray(new[name] - params[name])
        params = new
        if not seed % 2:
          params = each.site.finish(params)
          if t < 3:
            each.site.begin(params)
    return params

  together(lambda: run(a), lambda: run(b))
  assert a.hash == b.hash and a.site.round == 3
  for x, name in zip(a.site._run.common, total, strict=True):
    np.testing.assert_allclose(x, total[name] / 2, atol=1e-4)
  assert a.site.finish(a.params) is a.params


def test_weights_and_time(tmp_path):
  """A slow site does what it can, and counts for what it did."""
  fast, slow = sites(tmp_path, ("fast", "slow"), every=None, seconds=600.0)
  assert not fast.site.is_due(0) and not slow.site.is_due(99)
  for each in (fast, slow):
    each.site._due -= 600.0
  assert fast.site.is_due(0) and slow.site.is_due(99)
  results = together(lambda: fast.step(3.0), lambda: slow.step(1.0))
  assert results[0].members == ("fast", "slow")
  assert not fast.site.is_due(0)
  for name in ("b", "w"):
    own = [
      np.asarray(moved(zeros(), [0, *who])[name]) for who in (b"fast", b"slow")
    ]
    mean = 0.75 * own[0] + 0.25 * own[1]
    np.testing.assert_allclose(fast.params[name], mean, atol=1e-5)


def test_steps_of_a_round(tmp_path):
  site = edgc_jax.Site(tmp_path, "a", every=3)
  assert [site.is_due(step) for step in range(6)] == 2 * [False, False, True]


def test_parameters_keep_shardings_and_dtypes(tmp_path):
  """And what bfloat16 rounds away is no change of a site."""
  mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  sharding = NamedSharding(mesh, P("x", "y"))
  own = {
    "h": jnp.full((8, 8), 1 / 3, jnp.bfloat16),
    "n": np.ones(3, np.float32),
    "w": jax.device_put(jnp.ones((8, 8)), sharding),
  }
  site = edgc_jax.Site(tmp_path, "a", **QUICK)
  params = site.join(own)
  for _ in range(2):
    params = site.exchange(jax.tree.map(lambda x: x, params))
    jax.tree.map(np.testing.assert_array_equal, params, own)
  assert params["w"].sharding == sharding and params["h"].dtype == jnp.bfloat16
  assert type(params["n"]) is np.ndarray


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"name": "a/b"}, "`name` must be .*'a/b'"),
    ({"name": ""}, "`name` must be"),
    ({"every": None}, "`every` must be given, or `seconds`, and not both"),
    ({"seconds": 3.0}, "`every` must be given, or `seconds`, and not both"),
    ({"every": 0}, "`every` must be at least 1"),
    ({"density": 0.0}, r"`density` must be in \(0, 1\]"),
    ({"density": None, "bits": 3}, "`bits` must be 2 with a density"),
    ({"density": 0.1, "bits": 4}, "`bits` must be 2 with a density"),
    ({"residual_decay": 0.0}, "`residual_decay` must be"),
    ({"momentum": 1.0}, "`momentum` must be below 1"),
    ({"least": 0}, "`least` must be at least 1"),
    ({"most_norm": 1.0}, "`most_norm` must be above 1"),
    ({"patience": float("nan")}, "`patience` must be at least 0 and finite"),
    ({"checkpoint_every": 0}, "`checkpoint_every` must be at least 1"),
    ({"key": "text"}, "`key` must be bytes"),
  ],
)
def test_bad_options(tmp_path, options, match):
  with pytest.raises((ValueError, TypeError), match=match):
    edgc_jax.Site(tmp_path, **{"name": "a", "every": 1, **options})


@pytest.mark.parametrize("url", ["s3:/bucket/run", "s3://", "gs:", "s3:///run"])
def test_bad_urls(url):
  with pytest.raises(ValueError, match="`url` must be SCHEME://BUCKET/FOLDER"):
    edgc_jax.Site(url, "a", every=1)


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  for place in ("file", "file/below"):
    site = edgc_jax.Site(tmp_path / place, "a", **QUICK)
    with pytest.raises(SiteError, match=r"`url` must be of a folder or a buck"):
      site.join(zeros())


def test_bad_parameters_leave_a_site_as_it_is(tmp_path):
  (a,) = sites(tmp_path, "a")
  turned = collections.OrderedDict(reversed(a.params.items()))
  for wrong in ({"w": a.params["w"]}, {**a.params, "b": jnp.zeros(6)},
                {**a.params, "c": jnp.zeros(6)}, {}, turned):  # fmt: skip
    with pytest.raises(ValueError, match="`params` must be those of `join`"):
      a.site.exchange(wrong)
  assert a.step().members == ("a",)
  a.site.begin(a.params)
  with pytest.raises(ValueError, match="`params` must be those of `join`"):
    a.site.finish({})
  a.params = a.site.finish(a.params)
  a.site.leave()
  with pytest.raises(SiteError, match="are for sites that have joined"):
    a.step()
  other = edgc_jax.Site(tmp_path / "new", "a", **QUICK)
  with pytest.raises(ValueError, match="`params` must be finite"):
    other.join({"w": jnp.full(3, jnp.nan)})


def test_bad_calls(tmp_path):
  site = edgc_jax.Site(tmp_path, "a", **QUICK)
  with pytest.raises(SiteError, match=r"call params = site\.join"):
    site.exchange(zeros())
  with pytest.raises(TypeError, match="`params` must have arrays of floating"):
    site.join({"n": jnp.int32(1)})
  params = site.join(zeros())
  for weight in (0, -1, float("inf"), "1"):
    with pytest.raises((ValueError, TypeError), match="`weight` must be"):
      site.exchange(params, weight)
  with pytest.raises(ValueError, match="`params` must be finite"):
    site.exchange({**params, "b": jnp.full(5, jnp.nan)})
  site.begin(params)
  with pytest.raises(SiteError, match="must wait for the exchange in flight"):
    site.begin(params)
  site.finish(params)


def test_errors_of_a_store_without_its_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "fsspec", None)
  with pytest.raises(ImportError, match=r"install edgc-jax\[buckets\]"):
    edgc_jax.Site("s3://bucket/run", "a", every=1)


def test_nothing_is_written_before_a_site_joins(tmp_path):
  edgc_jax.Site(tmp_path / "run", "a", every=1)
  assert list(pathlib.Path(tmp_path).iterdir()) == []
