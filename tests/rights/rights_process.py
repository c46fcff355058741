"""A broker with rights and TLS in a process of its own."""

import json
import os
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import trustme
from served import PATIENT

import escrowmq as mq


class Process:
    """A broker in a process of its own, with everything it may serve. ``said``: its first line; ``output`` at the end:
    all that it printed."""

    def __init__(self, folder, rights, *words, tls=True, environment=None):
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.certificate, self.key = folder / "broker.pem", folder / "broker.key"
        self.issue()
        command = [
            "serve",
            "--folder",
            str(folder / "data"),
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--log-level",
            "info",
        ]
        command += ["--rights", str(rights.write())]
        if tls:
            command += [
                "--tls-cert",
                str(self.certificate),
                "--tls-key",
                str(self.key),
                "--tls-client-ca",
                str(self.ca),
            ]
        variables = {**os.environ, "SSL_CERT_FILE": str(self.ca), **(environment or {})}
        self.log = folder / "broker.log"  # a pipe that nobody reads would stop the broker
        command = [sys.executable, "-m", "escrowmq", *command, *words]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=log, text=True)
        self.said = json.loads(self.process.stdout.readline() or "{}") or self.fail()
        self.url = self.said.get("url")
        self.output = ""

    def fail(self):
        self.stop()
        raise AssertionError(self.output)

    def issue(self, **options):
        made = self.authority.issue_cert("127.0.0.1", **options)
        self.key.write_bytes(made.private_key_pem.bytes())
        self.key.chmod(0o600)
        self.certificate.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))

    def connect(self, **options):
        return mq.connect(self.url, tls=str(self.ca), **options)

    def http(self, url, token=None, body=None):
        """Status and text of a request."""
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        context = ssl.create_default_context(cafile=self.ca)
        try:
            with urllib.request.urlopen(request, timeout=PATIENT, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as problem:
            return problem.code, problem.read().decode()

    def stop(self):
        self.process.terminate()
        out, _ = self.process.communicate(timeout=PATIENT)
        self.output = out + self.log.read_text()


@contextmanager
def running(*given, **options):
    process = Process(*given, **options)
    try:
        yield process
    finally:
        process.stop()


def until(ready):
    """Look until something is so."""
    pause = threading.Event()
    for _ in range(int(PATIENT * 20)):
        if ready():
            return
        pause.wait(0.05)
    raise AssertionError("it did not come to that")
