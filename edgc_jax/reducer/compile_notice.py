"""Says that XLA compiles, if the first call of a train step takes long.

JAX reports the end of lowering, just before XLA starts, and the end of
compilation. A timer between the two logs a message, if the thread is in JAX's
compiler then: a program may be lowered alone.
"""

import logging
import sys
import threading

import jax

SECONDS = 10.0  # until the message
_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_thread = threading.local()  # a program is traced and compiled in one thread
_lock = threading.Lock()
_is_listening = False


def expect() -> None:
  """Expects that this thread compiles a program that it is tracing now."""
  global _is_listening
  with _lock:
    if not _is_listening:
      jax.monitoring.register_event_duration_secs_listener(_on_event)
      _is_listening = True
  _thread.is_tracing = True


def _on_event(event: str, duration_secs: float, **facts: str | int) -> None:
  del duration_secs
  fun_name = str(facts.get("fun_name", ""))
  timer = getattr(_thread, "timer", None)
  if event == _TRACED and getattr(_thread, "is_tracing", False):
    # `jax.eval_shape` traces, too, and compiles nothing: its name is kept.
    _thread.program, _thread.is_tracing = fun_name, False
  elif event in (_LOWERED, _COMPILED):
    if timer:
      timer.cancel()
    _thread.timer = None
    program = getattr(_thread, "program", None)
    # "jit(step)", or "pmap(step)"
    if event == _LOWERED and program and fun_name.endswith(f"({program})"):
      _thread.timer = threading.Timer(SECONDS, _say, [threading.get_ident()])
      _thread.timer.daemon = True
      _thread.timer.start()


def _is_compiling(thread: int) -> bool:
  frame = sys._current_frames().get(thread)
  while frame and frame.f_globals.get("__name__") != "jax._src.compiler":
    frame = frame.f_back
  return frame is not None


def _say(thread: int) -> None:
  if not _is_compiling(thread):
    return
  logging.getLogger("edgc_jax").warning(
    "XLA has been compiling a program with a reducer of edgc_jax for %d"
    " seconds. It does so once for each placement of its arguments;"
    " jax_compilation_cache_dir keeps the result (not for stages or shards on"
    " CPU devices).",
    SECONDS,
  )
