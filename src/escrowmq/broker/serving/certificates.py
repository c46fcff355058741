"""The certificate of a server, loaded again when its files change."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from escrowmq.errors import EscrowError
from escrowmq.platform.logs import tell
from escrowmq.wire.channel import server_context

POLL_SECONDS = 0.5


class ServerCertificate:
    """TLS of a server: certificate chain, key and, for client certificates, their authorities (PEM files).

    New connections use a new certificate within a second after its files have changed; open ones keep theirs. Files
    that cannot be used are logged, and the former certificate stays. Raises Misuse(BAD_SETTING) at the start.
    """

    def __init__(self, certificate: Path, key: Path, client_authorities: Path | None = None) -> None:
        self.certificate, self.key, self._client_authorities = certificate, key, client_authorities
        self._signature = self._sign()  # before they are read: a later change must be seen
        self.context: ssl.SSLContext = server_context(certificate, key, client_authorities)
        """For servers. Each handshake switches to the newest certificate."""
        self._newest = self.context
        # A new certificate in the same context would leave it without a key for a moment, and handshakes would fail.
        self.context.sni_callback = lambda connection, name, context: setattr(connection, "context", self._newest)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="escrowmq-certificate", daemon=True)
        if key.stat().st_mode & 0o077:
            sentence = f"other users of this machine can read the private key {key}: chmod 600 {key}"
            tell(logging.WARNING, "readable key", sentence, file=str(key))

    def start(self) -> None:
        """Start the thread that loads the certificate again when its files change."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that follows the files."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sign(self) -> tuple[tuple[int, int], ...] | None:
        try:
            return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (self.certificate.stat(), self.key.stat()))
        except OSError:
            return None

    def _follow(self) -> None:
        while not self._stopping.wait(POLL_SECONDS):
            signature = self._sign()
            if signature == self._signature:
                continue
            try:
                self._newest = server_context(self.certificate, self.key, self._client_authorities)
            except EscrowError as problem:
                tell(logging.ERROR, "certificate rejected", f"the former certificate stays: {problem.message}")
            else:
                tell(logging.INFO, "certificate", f"new connections use {self.certificate} as it is now")
            self._signature = signature
