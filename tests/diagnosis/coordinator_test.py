"""The first process listens on one address, which the others can reach."""

import socket

import pytest
from helpers.refusals import refused

from edgc_jax.diagnosis.coordinator import BIND, bind_address


@pytest.fixture(autouse=True)
def unset(monkeypatch):
  monkeypatch.delenv(BIND, raising=False)


def resolves_to(monkeypatch, *addresses):
  found = [
    info
    for address in addresses
    for info in socket.getaddrinfo(address, 1, type=socket.SOCK_STREAM)
  ]
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1"])
def test_loopback_may_be_said_and_the_number_of_a_name_is_taken(
  monkeypatch, address
):
  """A name may have further addresses, at which nothing has to listen."""
  resolves_to(monkeypatch, "127.0.0.1", "192.0.2.1")
  assert bind_address(address, 0) == "127.0.0.1:1"


@pytest.mark.parametrize(
  "address, here",
  [
    ("192.0.2.1:1", "which is none"),
    ("0.0.0.0:1", "which is all of them"),
    ("[::]:1", "which is all of them"),
    ("127.0.0.1", "got '127.0.0.1'"),
    (":1", "got ':1'"),
    ("127.0.0.1:70000", "got '127.0.0.1:70000'"),
  ],
)
def test_an_address_that_is_refused(address, here):
  if "[" in address and not socket.has_ipv6:
    pytest.skip("no IPv6 here")
  refused(lambda: bind_address(address, 0), "`--coordinator_address`", here)


def test_a_name_that_leads_to_loopback(monkeypatch):
  resolves_to(monkeypatch, "127.0.1.1")
  refused(lambda: bind_address("node0:1", 0), "node0:1", "which is 127.0.1.1")


def test_others_and_variables(monkeypatch):
  """Only the first process listens; JAX's variable stands above all."""
  assert bind_address("node0:1", 1) is None
  monkeypatch.setenv(BIND, "0.0.0.0:2")
  assert bind_address("node0:1", 0) == "0.0.0.0:2"
  assert bind_address("node0:1", 1) is None
