"""A model server on loopback that fails as told, and counts what it delivered: the other side of pool.py.

    with FaultServer(["500", "ok"]) as server:  # behaviour of the first request, of the second; then "ok"
    with FaultServer(lambda n: "reset" if n % 10 == 9 else "ok") as server:  # by the request's number, from 0

`server.url` is the base_url of a pool entry. A behaviour is one of:

    ok            a reply with usage                   null          content: null, with usage
    no_usage      a reply without usage                no_choices    choices: [], with usage
    null_usage    usage: null                          error_object  {"error": ...} under status 200
    hidden        40 tokens of reasoning, in total_tokens only       wrong_model   a reply by another model
    html          a page under status 200              truncated     half a JSON text
    cut           the connection drops in the middle of the body     reset         ... instead of a response
    timeout       nothing at all                       drip          the body byte by byte
    header_drip   the headers byte by byte             huge          a body that is far too long
    "429" or any other status, with Retry-After where written "429:1" or "429:Wed, 21 Oct 2026 07:28:00 GMT"

A hang lasts until the server is closed. The text of a reply is `answer(question)`, its tokens `count(text)`.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HIDDEN_TOKENS = 40
DRIP_S = 0.05


class FaultServer:
    """A server in threads of this process; use as a context manager.

    `requests` holds what arrived, in order: {"path", "headers", "body", "at"}. `delivered` counts, by model,
    the output tokens of each response that was sent whole and says what was generated; `prompts` theirs.
    """

    def __init__(
        self,
        script: Sequence[str] | Callable[[int], str] = (),
        *,
        answer: Callable[[str], str] = lambda question: f"The answer to {question}",
        count: Callable[[str], int] = lambda text: len(text.split()),
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._script, self.answer, self.count, self.before = script, answer, count, before
        self.requests: list[dict] = []
        self.delivered: Counter[str] = Counter()
        self.prompts: Counter[str] = Counter()
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fault = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def arrived(self, request: dict) -> tuple[int, str]:
        """Take down a request; its number and the behaviour it gets."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
        if callable(self._script):
            return number, self._script(number)
        return number, self._script[number] if number < len(self._script) else "ok"

    def sent(self, model: str, tokens: int, prompt_tokens: int) -> None:
        """Take down a response that was sent whole."""
        with self._lock:
            self.delivered[model] += tokens
            self.prompts[model] += prompt_tokens


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    fault: FaultServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what this server is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        fault = self.server.fault
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = {"path": self.path, "headers": dict(self.headers), "body": body, "at": time.monotonic()}
        number, behaviour = fault.arrived(request)
        fault.before(number)
        kind, _, argument = behaviour.partition(":")
        if kind.isdecimal():
            headers = {"Retry-After": argument} if argument else {}
            headers |= {"Location": "/elsewhere"} if kind.startswith("3") else {}
            self._send(b'{"error": {"message": "secret detail"}}', int(kind), headers)
        elif kind in ("timeout", "reset", "cut", "drip", "header_drip", "huge"):
            getattr(self, f"_{kind}")()
        else:
            self._reply(kind, body)

    def _reply(self, kind: str, body: dict) -> None:
        """A response under status 200: as it should be, or wrong in one way."""
        fault = self.server.fault
        prompt = body["messages"][-1]["content"]
        text = fault.answer(prompt.rpartition("Question: ")[2])
        asked, out = fault.count(prompt), fault.count(text)
        total = asked + out + (HIDDEN_TOKENS if kind == "hidden" else 0)
        answer = {
            "model": "somebody-else-70b" if kind == "wrong_model" else body["model"],
            "choices": [{"message": {"role": "assistant", "content": None if kind == "null" else text}}],
            "usage": {"prompt_tokens": asked, "completion_tokens": out, "total_tokens": total},
        }
        if kind == "no_usage":
            del answer["usage"]
        elif kind == "null_usage":
            answer["usage"] = None
        elif kind == "no_choices":
            answer["choices"] = []
        elif kind == "error_object":
            answer = {"error": {"message": "secret detail", "code": 502}}
        data = json.dumps(answer).encode()
        if kind == "html":
            data = b"<html><body>secret detail</body></html>"
        elif kind == "truncated":
            data = data[: len(data) // 2]
        self._send(data)
        if kind not in ("html", "truncated", "error_object"):
            fault.sent(body["model"], total - asked, asked)

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _timeout(self) -> None:
        self.close_connection = True
        self.server.fault.closing.wait()

    def _reset(self) -> None:
        """Close with RST instead of FIN: the client sees a connection reset by its peer."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _cut(self) -> None:
        self.close_connection = True
        self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [')

    def _drip(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        self._bytewise(b" " * 10000)

    def _header_drip(self) -> None:
        self._bytewise(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"." * 10000)

    def _bytewise(self, data: bytes) -> None:
        self.close_connection = True
        for byte in data:
            if self.server.fault.closing.wait(DRIP_S):
                return
            self.wfile.write(bytes([byte]))

    def _huge(self) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(64):
            self.wfile.write(b" " * (1 << 20))
