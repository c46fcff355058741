"""Who visits a console in tests: requests with cookies and forms, without a browser."""

from __future__ import annotations

import re
from typing import Any

import httpx


class Visitor:
    """A browser without eyes: it keeps cookies and sends forms with the token of the last page."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(keepalive_expiry=1.0)
        # Without TLS there is nothing to verify: to read the certificates for it takes 25 ms of processor time.
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=60.0, limits=limits, verify=False)
        self.token = ""

    def get(self, path: str, status: int = 200, **query: Any) -> str:
        answer = self.http.get(path, params=query or None)
        assert answer.status_code == status, (path, answer.status_code, answer.text[-2000:])
        if found := re.search(r'name="token" value="([0-9a-f]{64})"', answer.text):
            self.token = found[1]
        return answer.text

    def post(self, path: str, status: int = 303, **form: Any) -> str:
        """Send a form; the place where it leads, or the page of a refusal."""
        answer = self.http.post(path, data={"token": self.token, **form}, headers={"Origin": self.url})
        assert answer.status_code == status, (path, answer.status_code, answer.text[-2000:])
        return str(answer.headers.get("location", answer.text))
