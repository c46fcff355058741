"""A served broker with a rights file, and tokens of its principals."""

from contextlib import contextmanager

from served import Served

from escrowmq.rights import Guard
from escrowmq.rights.tokens import new_token


class RightsFile:
    """A rights file in a folder. ``tokens`` has the token of each principal."""

    def __init__(self, folder):
        self.path = folder / "rights.toml"
        self.tokens, self.entries = {}, {}

    def add(self, principal, *allow, more=""):
        """Give a principal these rules, and a token if it has none. Call :meth:`write` afterwards."""
        token = self.tokens.setdefault(principal, new_token().text)
        self.entries[principal] = (token, allow, more)
        return token

    def remove(self, principal):
        del self.entries[principal]

    def write(self):
        from escrowmq.rights.tokens import digest

        text = ""
        for name, (token, allow, more) in self.entries.items():
            rules = ", ".join(f'"{rule}"' for rule in allow)
            text += f'[principals.{name}]\ntokens = [{{ sha256 = "{digest(token)}" }}]\nallow = [{rules}]\n{more}\n'
        self.path.write_text(text)
        return self.path


@contextmanager
def guarded(folder, rights, follows=True, **settings):
    """A served broker with a rights file. ``follows``: whether it looks by itself whether the file has changed."""
    guard = Guard(rights.write())
    if follows:
        guard.start()
    served = Served(folder / "data", guard=guard, **settings)
    try:
        yield served
    finally:
        served.stop()
        guard.stop()
