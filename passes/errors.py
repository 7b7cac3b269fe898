"""One error class. A message has three parts: what is wrong, where, and what to do."""

from __future__ import annotations


class Error(Exception):
    """What shardc raises for bad input.

    `what` is one sentence, `where` a graph line or the user's own file:line (or None when the
    sentence says it all), `fix` what to do instead.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        self.what, self.where, self.fix = what, where, fix
        parts = [what, where and f"  at: {where}", fix and f"  fix: {fix}"]
        super().__init__("\n".join(part for part in parts if part))
