r"""Joins several processes into one run, through `jax.distributed`.

Under SLURM, Open MPI 4 and indexed Kubernetes jobs the processes find each
other. A flag names another of the ways that JAX knows (mpi4py for any MPI;
gcetpu, gketpu for Cloud TPUs). Otherwise flags give each process the address of
the first one and its index:

  mpirun -n 2 train_gpt2.py ... --cluster_detection_method=mpi4py
  train_gpt2.py ... --coordinator_address=HOST:PORT --num_processes=2 \
      --process_id=0

With flags the first process listens on that address alone. SECURITY.md says
what else listens.
"""

import atexit
import contextlib
import faulthandler
import ipaddress
import itertools
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import flags

from edgc_jax.diagnosis import coordinator
from edgc_jax.wire import cpu_backend
from experiments.trainer.runtime.refusals import one_line

_ADDRESS = flags.DEFINE_string(
  "coordinator_address", None, "HOST:PORT of the first of several processes."
)
_COUNT = flags.DEFINE_integer("num_processes", None, "Number of processes.")
_INDEX = flags.DEFINE_integer(
  "process_id", None, "Index of this process, from 0."
)
_METHOD = flags.DEFINE_string(
  "cluster_detection_method", None,
  "How the processes find each other, if not by themselves: as for"
  " jax.distributed.initialize.",
)  # fmt: skip
_TIMEOUT = flags.DEFINE_integer(
  "heartbeat_timeout", 100, "Seconds until a silent process counts as dead."
)

# Schedulers set these: the number of processes, or an index on Kubernetes.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
_AT_EXIT: list[Callable[[], None]] = []
_BARRIERS = itertools.count()
_BARRIER_TIMEOUT = 3600  # seconds; compiling may take long


def initialize() -> int:
  """Joins the other processes, if any; call it before JAX uses a device.

  Returns:
    The number of processes; 0 if only JAX's runtime knows it.

  Raises:
    ValueError: if only some of the flags are given, one is out of range, the
      others cannot reach the address, or the processes cannot find each other
      in the way that a flag names.
    RuntimeError: if the processes cannot find each other.
  """
  given = (_ADDRESS.value, _COUNT.value, _INDEX.value)
  has_flags = any(value is not None for value in given)
  for flag, remedy in (
    (_COUNT, "leave it out for a single process"),
    (_TIMEOUT, "100 is the default"),
  ):
    if flag.value is not None and flag.value < 1:
      raise ValueError(
        f"`--{flag.name}` must be at least 1, got {flag.value}; {remedy}."
      )
  if not (has_flags or _METHOD.value) and _scheduled_count() == 1:
    return 1
  if has_flags and None in given:
    raise ValueError(
      "`--coordinator_address`, `--num_processes` and `--process_id` must be"
      f" given together, got {', '.join(map(str, given))}; give all of them, or"
      " none for a single process or under a scheduler."
    )
  if _COUNT.value is not None and not 0 <= _INDEX.value < _COUNT.value:
    raise ValueError(
      f"`--process_id` must be between 0 and num_processes - 1"
      f" ({_COUNT.value - 1}), got {_INDEX.value}; number them from 0."
    )
  bind = None
  if has_flags:
    bind = coordinator.bind_address(_ADDRESS.value, _INDEX.value)
  if bind and coordinator.BIND not in os.environ:
    _warn_of_gloo(bind)
  # JAX aborts if another process is silent; its message is enough.
  faulthandler.disable()
  # For CPUs; other platforms have their own collectives.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      *given,
      cluster_detection_method=_METHOD.value,
      coordinator_bind_address=bind,
      heartbeat_timeout_seconds=_TIMEOUT.value,
    )
  except (ValueError, RuntimeError, KeyError, OSError, ImportError) as error:
    if _METHOD.value:
      raise ValueError(
        "`--cluster_detection_method` must be a way by which JAX finds the"
        f" processes here, got {_METHOD.value} ({_described(error)}); start"
        " them by what it needs (mpi4py: its package and mpirun), or give"
        " `--coordinator_address`, `--num_processes` and `--process_id`."
      ) from error
    source = f"--coordinator_address={_ADDRESS.value}"
    if not has_flags:
      names = [n for n in (*_COUNTS, *_KUBERNETES) if n in os.environ]
      source = ", ".join(f"{name}={os.environ[name]}" for name in names)
    raise RuntimeError(
      "The processes must be able to find each other, got"
      f" {source or 'no scheduler'} ({_described(error)}); give"
      " --coordinator_address, --num_processes and --process_id, with a free"
      " port of the first host, or for a single process unset the variables of"
      " the scheduler."
    ) from error
  return _COUNT.value or (0 if _METHOD.value else _scheduled_count())


def at_exit(clean_up: Callable[[], None]) -> None:
  """Calls a function when the process ends, by `end_together` too."""
  _AT_EXIT.append(clean_up)
  atexit.register(clean_up)


@contextlib.contextmanager
def end_together() -> Iterator[None]:
  """Ends a process that fails at once, if there are several, with a message.

  An orderly exit would wait for the other processes, and they for this one.
  """
  try:
    yield
  except BaseException as error:
    # A string is an error message; a number is a deliberate exit.
    is_exit = isinstance(error, SystemExit) and not isinstance(error.code, str)
    if jax.process_count() == 1 or is_exit:
      raise
    cause = error.__cause__ or error
    if isinstance(error, SystemExit):
      print(error.code, file=sys.stderr)
    elif isinstance(cause, jax.errors.JaxRuntimeError | TimeoutError):
      print(
        f"error: another process, or the network to it, has failed:"
        f" {str(cause)[:200]}; give the same command on all hosts again to"
        " resume from the newest checkpoint.",
        file=sys.stderr,
      )
    else:
      traceback.print_exception(error)
    for clean_up in _AT_EXIT:
      clean_up()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_first() -> bool:
  """Returns whether this is the process that writes and prints for all."""
  return jax.process_index() == 0


def say(text: str) -> None:
  """Prints `text` in the first process only."""
  if is_first():
    print(text, flush=True)


def wait_for_all(name: str) -> None:
  """Waits until every process has called this with the same name.

  Call it after work that takes some processes longer than others: a collective
  fails if a process is late for it by half a minute.

  Args:
    name: A name for this point of the program.
  """
  barrier = ocp.multihost.get_barrier_sync_fn()
  # Keys must be unique; all processes pass the same points in the same order.
  key = f"{name} {next(_BARRIERS)}"
  barrier(key=key, timeout_ms=_BARRIER_TIMEOUT * 1000)


def peak_memory() -> dict[str, int]:
  """Returns the peak memory so far, in bytes.

  Returns:
    peak_memory_bytes: Of this process, in host memory. On CPUs this includes
      all of its replicas, the compiler and the data.
    peak_device_memory_bytes: Of the device that used the most, as the backend
      counts; missing if the backend does not count, as on CPUs.
  """
  unit = 1 if sys.platform == "darwin" else 1024
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  statistics = (device.memory_stats() for device in jax.local_devices())
  peaks = [s["peak_bytes_in_use"] for s in statistics if s]
  return {"peak_memory_bytes": most} | (
    {"peak_device_memory_bytes": max(peaks)} if peaks else {}
  )


def _warn_of_gloo(address: str) -> None:
  """Warns if Gloo listens to other hosts in a run on loopback.

  It listens on the address of the host's name, and JAX has no option for it.
  """
  name, number = socket.gethostname(), address.rpartition(":")[0].strip("[]")
  with contextlib.suppress(OSError):  # Gloo will fail, too, and say why
    own = socket.gethostbyname(name)
    if _is_loopback(number) and not _is_loopback(own):
      print(
        f"warning: the processes connect at {own}, the address of {name}, which"
        " other hosts may reach; to keep them on loopback put '127.0.0.1"
        f" {name}' first into /etc/hosts (SECURITY.md)",
        file=sys.stderr,
      )


def _described(error: Exception) -> str:
  """Returns an error of JAX's runtime on one line that is not too long."""
  return f"{type(error).__name__}: {one_line(error)[:200]}"


def _is_loopback(number: str) -> bool:
  return ipaddress.ip_address(number).is_loopback


def require_devices() -> None:
  """Raises unless JAX finds devices, and CPU devices have enough threads.

  Raises:
    RuntimeError: if not.
  """
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:
    names = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    given = ", ".join(f"{n}={os.environ[n]}" for n in names if n in os.environ)
    text = one_line(error)[:200] or "there are none"
    raise RuntimeError(
      f"JAX must find devices, got none with {given or 'its defaults'}"
      f" ({text}); set JAX_PLATFORMS=cpu to train on CPUs, and unset others."
    ) from error
  cpu_backend.require_threads()


def _scheduled_count() -> int:
  """Returns the number of processes of a scheduler; 0 if JAX alone knows it.

  Raises:
    ValueError: if a variable of a scheduler is no number.
  """
  if all(name in os.environ for name in _KUBERNETES):
    return 0
  counts = [1]
  for name in _COUNTS:
    value = os.environ.get(name, "1")
    if not value.isdecimal():
      raise ValueError(
        f"`{name}` must be the number of processes of a job, got {value!r};"
        " unset it outside of one."
      )
    counts.append(int(value))
  return max(counts)


def wait_for_devices(tree: Any) -> None:
  """Waits until every device of this process has its part of the arrays.

  If another process dies, a collective fails on the devices that talk to it,
  while others of this process may wait for ever for what those had to pass on.

  Raises:
    jax.errors.JaxRuntimeError: as soon as one device has failed.
  """
  if jax.process_count() == 1:
    return
  parts = [
    part.data for x in jax.tree.leaves(tree) for part in x.addressable_shards
  ]
  while parts:
    is_ready = [part.is_ready() for part in parts]
    jax.block_until_ready(list(itertools.compress(parts, is_ready)))
    parts = [p for p, ready in zip(parts, is_ready, strict=True) if not ready]
    time.sleep(0.001 if parts else 0)
