"""A TCP proxy that can cut every connection and refuse new ones, or swallow everything, for a while or for good."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time


class CuttingProxy:
    """Forwards a port of its own to `target` on this host: `with CuttingProxy(port) as proxy`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.cuts = 0
        self._cut_for = self._silent_for = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(10)

    def cut(self, seconds: float) -> None:
        """Reset every connection, and refuse new ones for so long."""
        self._cut_for = seconds
        while self._cut_for and not self._stop:
            time.sleep(0.005)

    def swallow(self, seconds: float) -> None:
        """Keep every connection and take new ones, and forward nothing for so long: a black hole."""
        self._silent_for = seconds
        while self._silent_for and not self._stop:
            time.sleep(0.005)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop:
            time.sleep(0.01)

    def _run(self) -> None:
        poll = selectors.DefaultSelector()
        peers: dict[socket.socket, socket.socket] = {}
        assert self._listener is not None
        poll.register(self._listener, selectors.EVENT_READ)
        while not self._stop:
            for key, _ in poll.select(0.01):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept(poll, peers)
                elif sock in peers:
                    self._forward(poll, peers, sock)
            if self._silent_for:
                self._pause(self._silent_for)
                self._silent_for = 0.0
            if self._cut_for:
                self._cut(poll, peers)
        for sock in list(peers):
            self._drop(poll, peers, sock)
        if self._listener is not None:
            self._listener.close()
        poll.close()

    def _accept(
        self, poll: selectors.BaseSelector, peers: dict[socket.socket, socket.socket]
    ) -> None:
        assert self._listener is not None
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        self.connections += 1
        peers[client], peers[server] = server, client
        poll.register(client, selectors.EVENT_READ)
        poll.register(server, selectors.EVENT_READ)

    def _forward(
        self,
        poll: selectors.BaseSelector,
        peers: dict[socket.socket, socket.socket],
        sock: socket.socket,
    ) -> None:
        try:
            data = sock.recv(65536)
            if data:
                peers[sock].sendall(data)
                return
        except OSError:
            pass
        self._drop(poll, peers, sock)

    def _drop(
        self,
        poll: selectors.BaseSelector,
        peers: dict[socket.socket, socket.socket],
        sock: socket.socket,
    ) -> None:
        for end in (sock, peers.get(sock)):
            if end is None or end not in peers:
                continue
            poll.unregister(end)
            del peers[end]
            with contextlib.suppress(OSError):
                # Linger 0: the other side sees a reset, as after a cut, and not a clean end.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.close()

    def _cut(self, poll: selectors.BaseSelector, peers: dict[socket.socket, socket.socket]) -> None:
        assert self._listener is not None
        poll.unregister(self._listener)
        self._listener.close()
        for sock in list(peers):
            self._drop(poll, peers, sock)
        self._pause(self._cut_for)
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        poll.register(self._listener, selectors.EVENT_READ)
        self.cuts += 1
        self._cut_for = 0.0
