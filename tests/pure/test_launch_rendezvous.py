"""Nodes that share a token start together, strangers have no part, and a node that is missing is named on every other."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_epp.launch.gather import listening
from megatron_epp.launch.handshake import Hello, hello, new_nonce, read_greeting, receive_line
from megatron_epp.launch.machine import PortError
from megatron_epp.launch.rendezvous import AbsentError, TokenError, shared_token, wait_for_nodes
from tests.support.seeds import some_by_default

LIMIT_S = 120


TOKEN = b"of the run, and long enough"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def one(nodes, rank, port, wait_s, token=TOKEN):
    """Return the message of a rank's error, or nothing."""
    try:
        wait_for_nodes(nodes, rank, "127.0.0.1", port, wait_s, token)
    except AbsentError as error:
        return str(error)
    return None


def together(nodes, ranks, port, wait_s):
    """Return each rank's error message, or nothing."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: one(nodes, rank, port, wait_s), ranks))


def connected(port, host="127.0.0.1"):
    """A connection to a first node that is about to listen."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=LIMIT_S)
        except ConnectionRefusedError:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def placed(port, rank, nodes):
    """A connection that holds the place of a node."""
    other = connected(port)
    nonce = read_greeting(receive_line(other, time.monotonic() + LIMIT_S))
    other.sendall(f"{hello(TOKEN, nonce, Hello(rank, nodes, new_nonce()))}\n".encode())
    return other


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


def test_nodes_that_all_come_up_go_on_and_the_port_is_free_again(port):
    assert together(3, [2, 1, 0], port, 20) == [None] * 3
    with socket.create_server(("", port)):
        pass


def test_a_port_that_is_taken_is_said_by_the_first_node(port):
    with socket.create_server(("", port)), pytest.raises(PortError, match=rf"port {port} cannot be used here .*MASTER_PORT"):
        wait_for_nodes(2, 0, "127.0.0.1", port, 1.0, TOKEN)


def test_a_single_node_waits_for_nobody_and_needs_no_token(port, monkeypatch):
    monkeypatch.setenv("EPP_RENDEZVOUS_TOKEN", "short")
    wait_for_nodes(1, 0, "127.0.0.1", port, 0.0)


def test_the_node_that_is_missing_is_named_on_all_others(port):
    found = together(4, [0, 1, 3], port, 1.0)
    assert all("node 2 of 4 did not come up within 1 s" in text for text in found)


def test_of_many_that_are_missing_the_first_are_named(port):
    found = together(3000, [0, 1], port, 1.0)
    assert all("node 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 and 2982 more of 3000" in text for text in found)


def test_a_first_node_that_is_missing_is_said_with_where_it_was_looked_for(port):
    (found,) = together(2, [1], port, 1.0)
    assert f"node 0 does not answer at 127.0.0.1:{port} within 1 s" in found
    assert "MASTER_ADDR" in found


NONCE, PROOF = b"0" * 32, b"0" * 64
LINES = [b"GET / HTTP/1.1\n", b"1\n", b"megatron-epp node 1\n", b"node 1 2 " + NONCE + b" " + PROOF + b"\n", b"\0" * 5000]


@some_by_default("line", [*LINES[-2:], *LINES[:-2]], 2)
def test_a_stranger_gets_no_place_and_is_told_nothing(port, pool, line):
    first = pool.submit(one, 2, 0, port, 1.0)
    with connected(port) as stranger:
        receive_line(stranger, time.monotonic() + LIMIT_S)
        stranger.sendall(line)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert "node 1 of 2 did not come up" in first.result(LIMIT_S)


def test_what_a_node_has_said_proves_nothing_the_next_time(port, pool):
    first = pool.submit(one, 2, 0, port, 20)
    with connected(port) as node:
        nonce = read_greeting(receive_line(node, time.monotonic() + LIMIT_S))
        said = f"{hello(TOKEN, nonce, Hello(1, 2, new_nonce()))}\n".encode()
        node.sendall(said)
        receive_line(node, time.monotonic() + LIMIT_S)
    assert first.result(LIMIT_S) is None
    again = pool.submit(one, 2, 0, port, 1.0)
    with connected(port) as stranger:
        stranger.sendall(said)
        assert "node 1 of 2 did not come up" in again.result(LIMIT_S)


def test_callers_that_say_little_at_a_time_outlast_no_limit(port, pool):
    first = pool.submit(one, 2, 0, port, 1.0)
    with connected(port) as slow:
        while not first.done():
            with contextlib.suppress(OSError):
                slow.sendall(b"n")
            time.sleep(0.05)
    assert "node 1 of 2 did not come up" in first.result()


def test_a_first_node_that_says_little_at_a_time_outlasts_no_limit(port, pool):
    with socket.create_server(("127.0.0.1", port)) as server:
        node = pool.submit(one, 2, 1, port, 1.0)
        slow, _ = server.accept()
        with slow:
            while not node.done():
                with contextlib.suppress(OSError):
                    slow.sendall(b"m")
                time.sleep(0.05)
    assert "node 0 does not answer" in node.result()


def test_callers_that_say_nothing_keep_no_node_from_its_place(port, pool):
    first = pool.submit(one, 2, 0, port, 60)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connected(port))
        assert one(2, 1, port, 60) is None
        assert first.result(LIMIT_S) is None


def test_a_place_is_given_once(port, pool):
    first = pool.submit(one, 3, 0, port, 60)
    with placed(port, 1, 3):
        assert "node 1 is present already, from 127.0.0.1: give every node a NODE_RANK of its own" in one(3, 1, port, 60)
        assert "node 7 is not one of the 3 nodes" in one(3, 7, port, 60)
        assert "node 2 was started for 4 nodes, node 0 for 3: give all the same NNODES" in one(4, 2, port, 60)
        assert one(3, 2, port, 60) is None
    assert first.result(LIMIT_S) is None


def test_a_node_that_goes_away_and_comes_again_has_its_place(port, pool):
    first = pool.submit(one, 3, 0, port, 60)
    placed(port, 1, 3).close()
    others = [pool.submit(one, 3, rank, port, 60) for rank in (1, 2)]
    assert [other.result(LIMIT_S) for other in (first, *others)] == [None] * 3


def test_nodes_with_different_tokens_say_what_to_set(port, pool):
    first = pool.submit(one, 2, 0, port, 1.0)
    other = one(2, 1, port, 1.0, b"another token of the same length")
    remedy = "set EPP_RENDEZVOUS_TOKEN to the same 16 or more random characters on every node"
    assert "came without this run's token" in first.result(LIMIT_S)
    assert remedy in first.result()
    assert remedy in other


@some_by_default("answers", [[b"megatron-epp-rendezvous " + NONCE + b"\n", b"answer " + PROOF + b" \n"], [], [b"go\n"]], 1)
def test_a_stranger_in_the_place_of_the_first_node_starts_nobody(port, pool, answers):
    with socket.create_server(("127.0.0.1", port)) as server:
        node = pool.submit(one, 2, 1, port, 1.0)
        server.settimeout(0.1)
        while not node.done():
            with contextlib.suppress(OSError):
                stranger, _ = server.accept()
                with stranger:
                    for answer in answers:
                        stranger.sendall(answer)
                        stranger.recv(1000)
    assert "node 0 does not answer" in node.result()


def test_it_listens_where_it_is_looked_for_and_nowhere_else(port, pool):
    first = pool.submit(one, 2, 0, port, 60)
    with connected(port), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=LIMIT_S)
    assert one(2, 1, port, 60) is None
    assert first.result(LIMIT_S) is None


def test_an_address_that_is_of_another_machine_is_listened_for_everywhere(port):
    with listening("192.0.2.1", port, 1), socket.create_connection(("127.0.0.2", port), timeout=LIMIT_S):
        pass


def test_scripts_get_one_line_and_an_exit_code(port):
    command = [sys.executable, "-m", "megatron_epp.launch.rendezvous", "2", "1", "127.0.0.1", str(port), "0.5"]
    for token, words in ((TOKEN.decode(), "node 0 does not answer"), ("short", "EPP_RENDEZVOUS_TOKEN has 5 characters")):
        environment = os.environ | {"EPP_RENDEZVOUS_TOKEN": token}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 1
        *warned, error = done.stderr.splitlines()
        assert error.startswith(f"megatron-epp: error: {words}")
        assert [line[:25] for line in warned] == ["127.0.0.1 is an address o"] * (token != "short")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("EPP_RENDEZVOUS_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "megatron-epp"


def test_nodes_that_share_a_home_folder_share_a_token_that_nobody_else_can_read(home, pool):
    tokens = set(pool.map(lambda _: shared_token(), range(8)))
    assert len(tokens) == 1
    assert len(tokens.pop()) == 64
    assert [path.name for path in home.iterdir()] == ["rendezvous-token"]
    assert (home / "rendezvous-token").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_token_that_others_can_read_is_refused(home):
    shared_token()
    (home / "rendezvous-token").chmod(0o644)
    with pytest.raises(TokenError, match=r"rendezvous-token may be known to others: delete it .*set EPP_RENDEZVOUS_TOKEN"):
        shared_token()


def test_a_home_folder_that_cannot_hold_a_token_is_said(home):
    home.parent.mkdir()
    home.touch()
    with pytest.raises(TokenError, match=r"rendezvous-token cannot be used \(.*\): set EPP_RENDEZVOUS_TOKEN"):
        shared_token()


@pytest.mark.parametrize(("address", "warns"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("node1", False)])
def test_an_address_that_no_other_machine_can_reach_is_told_before_it_is_waited_for(monkeypatch, caplog, address, warns):
    monkeypatch.setattr("megatron_epp.launch.rendezvous._report", lambda *_: None)
    wait_for_nodes(2, 1, address, 29500, token=TOKEN)
    says = f"{address} is an address of this machine alone: nodes on other machines wait in vain unless MASTER_ADDR"
    assert (says in caplog.text) is warns
