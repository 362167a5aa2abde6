"""An ingress node without an engine: `python fake_node.py PORT NAME`.

POST waits for `delay` seconds and answers the node's name. PUT /control takes {"delay": seconds, "statuses": {path: status}}.
GET /control gives the number of POSTs so far and the number of those in progress.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

state: dict[str, Any] = {"delay": 0.0, "statuses": {}, "posts": 0, "in_work": 0, "request_id": None}
lock = threading.Lock()


class Node(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/control":
            self._answer(200, json.dumps(state))
        else:
            self._answer(state["statuses"].get(self.path, 200), self.path)

    def do_PUT(self) -> None:
        state.update(json.loads(self._body()))
        self._answer(200, "")

    def do_POST(self) -> None:
        self._body()
        with lock:
            state["posts"] += 1
            state["in_work"] += 1
            state["request_id"] = self.headers["X-Request-Id"]
        time.sleep(state["delay"])
        with lock:
            state["in_work"] -= 1
        self._answer(state["statuses"].get(self.path, 200), sys.argv[2])

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Node).serve_forever()
