"""An object store of S3 on a virtual host, which moto simulates."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from experiments.lab.network.virtual_hosts import VirtualHosts, address

BUCKET = "s3://runs"
_PORT, _TIMEOUT = 5000, 60.0
# The server asks for no credentials, but its clients want some.
_ENVIRONMENT = {
  "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
  "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
_CREATE = "import boto3; boto3.client('s3').create_bucket(Bucket='runs')"


def exit_unless_installed() -> None:
  """Ends the program if there can be no store."""
  if shutil.which("moto_server", path=_path()) is None:
    sys.exit("error: moto_server is not installed; run `make .venv/emulators`.")


@contextlib.contextmanager
def serving(
  network: VirtualHosts, index: int, log: pathlib.Path
) -> Iterator[dict[str, str]]:
  """Runs a store with an empty bucket.

  Args:
    network: The hosts.
    index: The store's own.
    log: The file of its log.

  Yields:
    Environment variables of its clients.
  """
  clients = {
    **_ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{address(index)}:{_PORT}",
  }  # fmt: skip
  log.parent.mkdir(parents=True, exist_ok=True)
  with log.open("w") as output:
    server = subprocess.Popen(
      [*network.inside(index), "moto_server", "-H", address(index), "-p",
       str(_PORT)],
      stdin=subprocess.DEVNULL, stdout=output, stderr=output,
      env=os.environ | {"PATH": _path()},
    )  # fmt: skip
  try:
    _create([*network.inside(index), sys.executable, "-c", _CREATE], clients)
    yield clients
  finally:
    server.kill()
    server.wait()


def _create(command: list[str], clients: dict[str, str]) -> None:
  """Creates the bucket, as soon as the server answers."""
  end = time.monotonic() + _TIMEOUT
  while True:
    done = subprocess.run(
      command, env=os.environ | clients, capture_output=True, text=True,
      check=False,
    )  # fmt: skip
    if not done.returncode:
      return
    if time.monotonic() > end:
      sys.exit(f"error: moto_server does not answer: {done.stderr[-500:]}")
    time.sleep(0.5)


def _path() -> str:
  """Returns where programs are, those of this Python's environment first."""
  own = str(pathlib.Path(sys.executable).parent)
  return os.pathsep.join([own, os.environ.get("PATH", "")])
