"""Admin calls about access rights."""

from __future__ import annotations

from escrowmq.client.admin.asking import Asking
from escrowmq.client.altering import signed
from escrowmq.client.entries import Denials, ReloadedRights, WhoAmI
from escrowmq.client.links.answers import Listing
from escrowmq.wire.actions import rights


class RightsAdmin(Asking):
    """Calls about access rights. See :class:`escrowmq.client.admin.Admin`."""

    def whoami(self) -> Listing[WhoAmI]:
        """Return the caller's principal and its rules, as each broker knows them."""
        return self._rows(rights.WHOAMI({}), None)

    def denials(self) -> Listing[Denials]:
        """Return the last 1,000 denied calls of each broker, counted by principal and missing right."""
        return self._rows(rights.DENIALS({}), None)

    def reload_rights(self, *, why: str | None = None) -> Listing[ReloadedRights]:
        """Make each broker read its rights file now. An invalid file changes nothing and raises BAD_SETTING."""
        return self._rows(rights.RELOAD(signed(rights.Reload(), why)), None)
