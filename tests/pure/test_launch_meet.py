"""Nodes start together, and one that does not come up is named on every node that did."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_epp.launch.meet import AbsentError, PortError, meet


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def together(nodes, ranks, port, wait_s):
    """What each of the ranks met with: nothing, or the message of its error."""

    def one(rank):
        try:
            meet(nodes, rank, "127.0.0.1", port, wait_s)
        except AbsentError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_nodes_that_all_come_up_go_on_and_the_port_is_free_again(port):
    assert together(3, [2, 1, 0], port, 20) == [None] * 3
    with socket.create_server(("", port)):
        pass


def test_a_port_that_is_taken_is_said_by_the_first_node(port):
    with socket.create_server(("", port)), pytest.raises(PortError, match=rf"port {port} cannot be used here .*MASTER_PORT"):
        meet(2, 0, "127.0.0.1", port, 1.0)


def test_a_single_node_waits_for_nobody(port):
    meet(1, 0, "127.0.0.1", port, 0.0)


def test_the_node_that_is_missing_is_named_on_all_others(port):
    found = together(4, [0, 1, 3], port, 2.0)
    assert all("node 2 of 4 did not come up within 2 s" in text for text in found)


def test_a_first_node_that_is_missing_is_said_with_where_it_was_looked_for(port):
    (found,) = together(2, [1], port, 1.0)
    assert f"node 0 does not answer at 127.0.0.1:{port} within 1 s" in found
    assert "MASTER_ADDR" in found


def test_strangers_on_the_port_are_not_counted(port):
    def stranger():
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as other:
                    other.sendall(b"GET / HTTP/1.1\n")
                    return
            except OSError:
                time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(stranger)
        assert "node 1 of 2 did not come up" in together(2, [0], port, 1.5)[0]


def test_scripts_get_one_line_and_an_exit_code(port):
    command = [sys.executable, "-m", "megatron_epp.launch.meet", "2", "1", "127.0.0.1", str(port), "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("megatron-epp: error: node 0 does not answer")
    assert done.stderr.count("\n") == 1
