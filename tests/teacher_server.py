"""A local server that answers as an OpenAI-compatible endpoint does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers with what `reply` makes of (number of the request, last message)."""

    daemon_threads = True

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.asked, self.seen = reply, 0, []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked += 1
            number = self.server.asked
            self.server.seen.append(
                (self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            )
        status, reply = self.server.reply(number, body["messages"][-1]["content"])
        message = {"role": "assistant", "content": reply}
        content = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        content |= {"id": "1", "created": 1, "model": "m", "system_fingerprint": ""}
        content |= {"usage": {"completion_tokens": 1, "prompt_tokens": 1, "total_tokens": 2}}
        content = content if status == 200 else {"error": {"message": reply}}
        data = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # who asked has gone
            pass

    def log_message(self, *args):
        pass


@contextmanager
def serving() -> Iterator[Callable[..., Server]]:
    """What starts a server with a `reply`; all are stopped at the end."""
    servers = []

    def start(reply: Callable[[int, str], tuple[int, str]]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
