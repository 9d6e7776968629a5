"""Object stores on loopback, with an empty bucket `runs` each."""

import contextlib
import http
import importlib
import logging

import pytest

from helpers.local_processes import free_port

# Neither client asks a cloud for credentials, or whether it runs in one.
_S3 = {
  "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
  "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
_GS = {
  "NO_GCE_CHECK": "true", "GOOGLE_CLOUD_PROJECT": "any",
  "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "FSSPEC_GCS_TOKEN": "anon",
}  # fmt: skip


@contextlib.contextmanager
def s3():
  """Yields the URL of a bucket of S3; programs find it by the environment."""
  port = free_port()
  with _environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", **_S3):
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server", exc_type=ImportError)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    try:
      boto3.client("s3").create_bucket(Bucket="runs")
      yield "s3://runs"
    finally:
      server.stop()


@contextlib.contextmanager
def gs():
  """Yields the URL of a bucket of Google Cloud Storage, likewise."""
  port = free_port()
  url = f"http://127.0.0.1:{port}"
  places = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}
  with _environment(**places, **_GS) as patch:
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    emulator = importlib.import_module("gcp_storage_emulator.server")
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    handler = importlib.import_module("gcp_storage_emulator.handlers.objects")
    patch.setattr(handler, "download", _with_versions(handler.download))
    upload = "_multipart_upload"  # of objects below 5 MB
    patch.setattr(handler, upload, _exclusive(getattr(handler, upload)))
    server = emulator.create_server(
      "127.0.0.1", port, in_memory=True, default_bucket="runs"
    )
    server.start()
    try:
      yield "gs://runs"
    finally:
      server.stop()


def _with_versions(download):
  """Adds the header of Google's store that names the version of an object."""

  def handle(request, response, store, *arguments, **options):
    download(request, response, store, *arguments, **options)
    if response.status < 300:
      names = (request.params[key] for key in ("bucket_name", "object_id"))
      response["x-goog-generation"] = store.get_file_obj(*names)["generation"]

  return handle


def _exclusive(upload):
  """Refuses to replace an object where Google's store does."""

  def handle(request, response, store):
    query = request.query
    if query.get("ifGenerationMatch", [""])[0] == "0":
      (name,) = query.get("name") or [request.data["meta"]["name"]]
      bucket = request.params["bucket_name"]
      if any(x["name"] == name for x in store.get_file_list(bucket)[0]):
        response.status = http.HTTPStatus.PRECONDITION_FAILED
        return None
    return upload(request, response, store)

  return handle


@contextlib.contextmanager
def _environment(**variables):
  with pytest.MonkeyPatch.context() as patch:
    for name, value in variables.items():
      patch.setenv(name, value)
    yield patch
