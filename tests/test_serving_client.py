# SPDX-License-Identifier: Apache-2.0
"""The client of the serving benchmarks: refusals, deadlines, and in which order it asks."""

from __future__ import annotations

import http.server
import json
import threading
import time

import pytest
from serving_client import Client, Outcome, OutOfTime
from serving_workloads import Request


@pytest.fixture
def refusing_server():
    """Answers 400, or ends the connection, by the first token of the prompt."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["input_ids"][0] == 400:
                self.send_response(400)
                self.end_headers()
                self.wfile.write(b'{"error": "too long"}')
            elif body["input_ids"][0] == 200:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'data: {"meta_info": {}}\n\ndata: [DONE]\n\n')

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_refused_requests_are_recorded_as_errors(refusing_server):
    client = Client(refusing_server, left=lambda: 60.0)
    outcomes, _ = client.one_by_one([Request(str(code), (code,)) for code in (400, 200, 0)], lambda _request: None)
    refused, empty, ended = (outcome.to_json() for outcome in outcomes)
    assert "answered 400" in refused["error"] and "too long" in refused["error"]
    assert "answered 200" in empty["error"]  # no token in it
    assert "broke off" in ended["error"]


def test_a_deadline_ends_a_case_without_a_record(refusing_server):
    client = Client(refusing_server, left=lambda: 0.0)
    with pytest.raises(OutOfTime):
        client.one_by_one([Request("x", (400,))], lambda _request: None)
    with pytest.raises(OutOfTime):
        client.offered([Request("x", (400,)), Request("y", (400,))], "0.001", 1, lambda _request: None)


def test_clients_ask_in_order_and_no_prompt_twice_at_a_time():
    client = Client(0, left=lambda: 60.0)
    lock, both = threading.Lock(), threading.Barrier(2, timeout=10)
    flying: list[str] = []
    begun: list[tuple[str, ...]] = []

    def send(request, body, start):
        with lock:
            flying.append(request.name)
            begun.append(tuple(flying))
        if request.name in "ab" and len(begun) < 3:
            both.wait()  # two are in flight at the same time
        if request.name == "a":
            time.sleep(0.05)  # the others come to the second one meanwhile
        with lock:
            flying.remove(request.name)
        assert json.loads(body)["input_ids"] == list(request.tokens)
        return Outcome(request.name, len(request.tokens), sent=0.25)

    client.send = send
    asked = [Request(name, (ord(name),)) for name in "abacb"]
    outcomes, seconds = client.closed_loop(asked, 2, lambda _request: None)
    assert [outcome.name for outcome in outcomes] == list("abacb") and seconds > 0
    assert all(outcome.due == outcome.sent for outcome in outcomes)
    assert max(len(names) for names in begun) == 2 and all(len(set(names)) == len(names) for names in begun)
    with pytest.raises(OutOfTime):
        Client(0, left=lambda: 0.0).closed_loop(asked, 2, lambda _request: None)
