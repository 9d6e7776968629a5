"""The first process listens on one address, which the others can reach."""

import socket

import pytest
from helpers.refusals import refused

from edgc_jax.diagnosis.coordinator import BIND, bind_address


@pytest.fixture(autouse=True)
def unset(monkeypatch):
  monkeypatch.delenv(BIND, raising=False)


@pytest.mark.parametrize(
  "address, number",
  [("127.0.0.1:1", "127.0.0.1:1"), ("localhost:1", "127.0.0.1:1")],
)
def test_loopback_may_be_said(monkeypatch, address, number):
  found = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
  assert bind_address(address, 0) == number


def test_the_number_of_a_name_is_taken(monkeypatch):
  """A name may have further addresses, at which nothing has to listen."""
  found = [
    *socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM),
    *socket.getaddrinfo("192.0.2.1", 1, type=socket.SOCK_STREAM),
  ]
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
  assert bind_address("localhost:1", 0) == "127.0.0.1:1"


@pytest.mark.parametrize(
  "address, here",
  [
    ("192.0.2.1:1", "which is none"),
    ("none.invalid:1", "which is none"),
    ("0.0.0.0:1", "which is all of them"),
    ("[::]:1", "which is all of them"),
    ("127.0.0.1", "got '127.0.0.1'"),
    ("127.0.0.1:port", "got '127.0.0.1:port'"),
    (":1", "got ':1'"),
    ("127.0.0.1:70000", "got '127.0.0.1:70000'"),
  ],
)
def test_an_address_that_is_refused(address, here):
  if "[" in address and not socket.has_ipv6:
    pytest.skip("no IPv6 here")
  refused(lambda: bind_address(address, 0), "`--coordinator_address`", here)


def test_a_name_that_leads_to_loopback(monkeypatch):
  found = socket.getaddrinfo("127.0.1.1", 1, type=socket.SOCK_STREAM)
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
  refused(lambda: bind_address("node0:1", 0), "node0:1", "which is 127.0.1.1")


def test_others_and_variables(monkeypatch):
  """Only the first process listens; JAX's variable stands above all."""
  assert bind_address("node0:1", 1) is None
  monkeypatch.setenv(BIND, "0.0.0.0:2")
  assert bind_address("node0:1", 0) == "0.0.0.0:2"
  assert bind_address("node0:1", 1) is None
