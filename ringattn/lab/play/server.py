"""The server of `ringattn play`: one page and its answers, for browsers on this machine only."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from ...errors import InvalidInput, RingAttentionError
from ...files import replace_nonfinite
from ...text import shorten
from .answer import answer
from .page import render

#: The most bytes of a question.
MOST = 1 << 16
#: The page needs nothing from elsewhere, and no other page may show it in a frame.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class PlayServer(ThreadingHTTPServer):
    """Serves the page on a port of 127.0.0.1, 0 for a free one. Raises InvalidInput if the port cannot be used."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        #: Plans share caches, and answers share cores: one answer at a time.
        self.answering = Lock()
        try:
            super().__init__(("127.0.0.1", port), PlayHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidInput(f"port={port}: cannot be used ({reason}); leave it out for a free one") from None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class PlayHandler(BaseHTTPRequestHandler):
    """GET / is the page; POST /answer takes {"verb": ..., "settings": {...}} and replies with JSON."""

    server: PlayServer

    def do_GET(self) -> None:
        if not self._is_foreign():
            found = self.path == "/"
            self._reply(200 if found else 404, render() if found else "there is only /", "html" if found else "plain")

    def do_POST(self) -> None:
        if self._is_foreign():
            return
        try:
            code, found = 200, self._answer()
        except RingAttentionError as error:
            code, found = 400, {"error": str(error)}
        self._reply(code, json.dumps(replace_nonfinite(found)), "json")

    def _answer(self) -> dict[str, object]:
        length = self.headers.get("Content-Length", "")
        if self.path != "/answer" or not re.fullmatch("[0-9]{1,9}", length) or int(length) > MOST:
            raise InvalidInput(f"POST {shorten(self.path, 40)}: expected /answer with at most {MOST:,} bytes of JSON")
        try:
            question = json.loads(self.rfile.read(int(length)))
            verb, settings = question["verb"], {**question["settings"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidInput('the question is not JSON like {"verb": "plan", "settings": {"ranks": 8}}') from None
        with self.server.answering:
            return answer(settings, str(verb))

    def _is_foreign(self) -> bool:
        """Refuse a request that a page of another site made, through a name of its own for 127.0.0.1 or directly."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        foreign = host.partition(":")[0] not in ("127.0.0.1", "localhost") or origin not in (None, f"http://{host}")
        if foreign:
            self._reply(403, "only for this machine's own page", "plain")
        return foreign

    def _reply(self, code: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(code)
        kind = "application/json" if kind == "json" else f"text/{kind}; charset=utf-8"
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each answer would bury the address of the page."""
