"""Several processes as one run, on JAX's own runtime.

Under SLURM, Open MPI and indexed Kubernetes jobs they find each other; else
each is told where the first one listens and which it is:

  train_gpt2.py ... --coordinator_address=HOST:PORT --num_processes=2 \
      --process_id=0
"""

import contextlib
import itertools
import os
import resource
import sys
import traceback
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp
from absl import flags

_ADDRESS = flags.DEFINE_string(
  "coordinator_address", None, "HOST:PORT of the first of several processes."
)
_COUNT = flags.DEFINE_integer("num_processes", None, "How many there are.")
_INDEX = flags.DEFINE_integer("process_id", None, "Which this is, from 0.")
_TIMEOUT = flags.DEFINE_integer(
  "heartbeat_timeout", 100, "Seconds until a silent process is given up."
)

# What tells that a scheduler started several: how many, or which this is.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_POINTS = itertools.count()
_PATIENCE = 3600  # seconds; compiling may take long
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


def initialize() -> int:
  """Joins the other processes, if there are any; before devices are used.

  Returns:
    How many processes there are; 0 where the runtime alone knows.

  Raises:
    ValueError: if only some of the flags are given, or one is out of range.
    RuntimeError: if the others cannot be reached.
  """
  given = (_ADDRESS.value, _COUNT.value, _INDEX.value)
  is_told = any(value is not None for value in given)
  if not is_told and not _is_scheduled():
    return 1
  if is_told and None in given:
    raise ValueError(
      "`--coordinator_address`, `--num_processes` and `--process_id` must be"
      f" given together, got {', '.join(map(str, given))}; give the others, or"
      " none for a single process or those of a scheduler."
    )
  if _COUNT.value is not None and not 0 <= _INDEX.value < _COUNT.value:
    raise ValueError(
      f"`--process_id` must be between 0 and num_processes - 1"
      f" ({_COUNT.value - 1}), got {_INDEX.value}; number them from 0."
    )
  # Among CPUs; other platforms have their own.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(*given, heartbeat_timeout_seconds=_TIMEOUT.value)
  return _COUNT.value or _scheduled_count()


@contextlib.contextmanager
def end_together() -> Iterator[None]:
  """Where one of several processes fails, ends it at once, with a message.

  An orderly end would wait for the others, and they for this one.
  """
  try:
    yield
  except BaseException as error:
    is_asked = isinstance(error, SystemExit) and not isinstance(error.code, str)
    if jax.process_count() == 1 or is_asked:
      raise
    cause = error.__cause__ or error
    if isinstance(error, SystemExit):
      print(error.code, file=sys.stderr)
    elif isinstance(cause, jax.errors.JaxRuntimeError | TimeoutError):
      print(
        f"error: another process is gone, or the network to it:"
        f" {str(cause)[:200]}; give the same command on all hosts again to go"
        " on from the newest checkpoint.",
        file=sys.stderr,
      )
    else:
      traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_first() -> bool:
  """Whether this process writes and prints for all."""
  return jax.process_index() == 0


def say(text: str) -> None:
  """Prints once for all processes."""
  if is_first():
    print(text, flush=True)


def wait_for_all(what: str) -> None:
  """Until every process is at the same point.

  Before work that took some of them longer than others: collectives that some
  processes are late for by half a minute fail.

  Args:
    what: A name for the point.
  """
  barrier = ocp.multihost.get_barrier_sync_fn()
  # Each key once: all processes pass the same points in the same order.
  barrier(key=f"{what} {next(_POINTS)}", timeout_ms=_PATIENCE * 1000)


def peak_memory() -> dict[str, int]:
  """The most memory that was used at once, in bytes.

  Returns:
    peak_memory_bytes: Of this process, in the host's memory; on CPUs that is
      all replicas of the process, compiler and data included.
    peak_device_memory_bytes: Of the fullest of its devices, by the backend's
      own account; left out where the backend keeps none, as on CPUs.
  """
  unit = 1 if sys.platform == "darwin" else 1024
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  statistics = (device.memory_stats() for device in jax.local_devices())
  peaks = [s["peak_bytes_in_use"] for s in statistics if s]
  return {"peak_memory_bytes": most} | (
    {"peak_device_memory_bytes": max(peaks)} if peaks else {}
  )


def _is_scheduled() -> bool:
  return _scheduled_count() != 1


def _scheduled_count() -> int:
  if all(name in os.environ for name in _KUBERNETES):
    return 0
  return max(int(os.environ.get(name, 1)) for name in _COUNTS)
