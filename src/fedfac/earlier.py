"""Earlier rounds that a run can go back to.

Of some rounds, ``EVERY`` apart, everything is kept that later rounds overwrite: the server's state, what the rule
remembers, the last evaluation, and of the clients that have trained since, what they had then. It is written in the
same transaction as the rounds, so it never belongs to another moment than they do.

    earlier             the rounds that are kept; ``reaches``: the last round that was written since then
    earlier_state       by round: the server's state and the memory
    earlier_personal    by client, its state in the kept round ``until`` and since the kept round before that one;
                        without data: it had none
    earlier_evaluation  by round: the evaluation that was the last one then

A client that trains in ten rounds between two of them is kept once. The oldest ones leave: ``MOST`` stay, and fewer
(but always one) beyond ``ROOM`` bytes: a file is at most ``ROOM`` larger than without them, or twice as large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfac.database import Database
from fedfac.errors import RunError

MOST = 3
EVERY = 5  # rounds; one in which a client's state is not overwritten costs nothing
ROOM = 1 << 30  # bytes of personal states
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS earlier (round INTEGER PRIMARY KEY, reaches INTEGER NOT NULL, bytes INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS earlier_state"
    " (round INTEGER, what TEXT, data BLOB NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (round, what))",
    "CREATE TABLE IF NOT EXISTS earlier_personal"
    " (until INTEGER, client INTEGER, data BLOB, digest TEXT, PRIMARY KEY (until, client))",
    "CREATE TABLE IF NOT EXISTS earlier_evaluation"
    " (round INTEGER PRIMARY KEY, number INTEGER NOT NULL, clients TEXT NOT NULL)",
)
_ROUND_OF = {
    "earlier": "round",
    "earlier_state": "round",
    "earlier_evaluation": "round",
    "earlier_personal": "until",
}


def keep(db: Database, new: Mapping[int, int], *, every: int) -> None:
    """Inside a transaction, before its rounds are written: keep what they overwrite.

    ``new`` has the bytes of every client's new state.
    """
    (last,) = db.all("SELECT max(round) FROM rounds")[0]
    if last is None:
        return
    for sql in _SCHEMA:
        db.execute(sql)
    newest, reaches = _newest(db)
    if newest is not None and reaches != last:  # another version has written since, and did not know of this
        _forget(db, ">= ?", 0)
        newest = None
    if newest is None or last - newest >= every:
        _keep_round(db, last)
        newest = last
    kept = sum(size for client, size in new.items() if _keep_client(db, client, newest))
    db.execute("UPDATE earlier SET bytes = bytes + ? WHERE round = ?", (kept, newest))
    _make_room(db)


def reached(db: Database, round: int) -> None:
    """Inside the same transaction: the last round that it writes."""
    if "earlier" in db.tables():
        db.execute("UPDATE earlier SET reaches = ? WHERE round = (SELECT max(round) FROM earlier)", (round,))


def rounds(db: Database) -> list[int]:
    """The rounds that the run can go back to, ascending."""
    if not _ROUND_OF.keys() <= db.tables():
        return []
    (last,) = db.all("SELECT max(round) FROM rounds")[0]
    if last is None or _newest(db)[1] != last:
        return []
    return [row[0] for row in db.all("SELECT round FROM earlier ORDER BY round")]


def check(db: Database, round: int) -> None:
    """Fail unless the run can go back to that round, and all that this takes is whole."""
    there = rounds(db)
    if round not in there:
        (last,) = db.all("SELECT max(round) FROM rounds")[0]
        known = f"It can go back to {_listed(there)}" if there else "No earlier round is kept"
        raise RunError(
            f"{db.path.parent} cannot go back to round {round}: its state after that round is not there (any more). "
            f"{known}; its last whole round is {'none' if last is None else last}. Nothing was changed."
        )
    states = "SELECT what, data, digest FROM earlier_state WHERE round = ?"
    for what, data, digest in db.iterate(states, (round,)):
        db.state(f"the {what} of round {round}", data, digest)
    personal = "SELECT client, data, digest FROM earlier_personal WHERE until >= ? AND data IS NOT NULL"
    for client, data, digest in db.iterate(personal, (round,)):
        db.state(f"an earlier state of client {client}", data, digest)


def restore(db: Database, round: int) -> None:
    """Go back, in one transaction: what came after that round is gone."""
    db.begin()
    later = [row[0] for row in db.all("SELECT round FROM earlier WHERE round >= ? ORDER BY round DESC", (round,))]
    for until in later:  # the earliest of a client's states since then comes last, and stays
        owners = "SELECT client FROM earlier_personal WHERE until = ?"
        db.execute(f"DELETE FROM personal WHERE client IN ({owners})", (until,))
        db.execute(
            "INSERT INTO personal SELECT client, data, digest FROM earlier_personal"
            " WHERE until = ? AND data IS NOT NULL",
            (until,),
        )
    for what in ("server", "memory"):
        if what in db.tables():
            db.execute(f"DELETE FROM {what}")
            sql = f"INSERT INTO {what} SELECT 0, data, digest FROM earlier_state WHERE round = ? AND what = ?"
            db.execute(sql, (round, what))
    db.execute("DELETE FROM evaluation")
    db.execute("INSERT INTO evaluation SELECT 0, number, clients FROM earlier_evaluation WHERE round = ?", (round,))
    db.execute("DELETE FROM rounds WHERE round > ?", (round,))
    _forget(db, ">= ?", round)
    reached(db, round)
    db.execute("COMMIT")


def _newest(db: Database) -> tuple[Any, Any]:
    """The newest round that is kept, and the last one that was written since; (None, None) if none is."""
    return db.one("SELECT round, reaches FROM earlier ORDER BY round DESC LIMIT 1") or (None, None)


def _keep_round(db: Database, last: int) -> None:
    db.execute("INSERT INTO earlier VALUES (?, ?, 0)", (last, last))
    for what in ("server", "memory"):
        if what in db.tables():
            db.execute(f"INSERT INTO earlier_state SELECT ?, ?, data, digest FROM {what}", (last, what))
    db.execute("INSERT INTO earlier_evaluation SELECT ?, round, clients FROM evaluation", (last,))


def _keep_client(db: Database, client: int, newest: int) -> bool:
    """Keep what a client has before it is overwritten, unless that was done since ``newest``; whether bytes came in."""
    where = client, newest
    if db.one("SELECT 1 FROM earlier_personal WHERE client = ? AND until = ?", where) is not None:
        return False
    copied = db.execute(
        "INSERT INTO earlier_personal SELECT ?, client, data, digest FROM personal WHERE client = ?", (newest, client)
    )
    if copied.rowcount:
        return True
    db.execute("INSERT INTO earlier_personal VALUES (?, ?, NULL, NULL)", (newest, client))
    return False


def _make_room(db: Database) -> None:
    """Let the oldest ones go."""
    total, oldest = 0, None
    for number, (kept, size) in enumerate(
        db.all("SELECT round, CAST(bytes AS INTEGER) FROM earlier ORDER BY round DESC")
    ):
        total += size
        if number and (number >= MOST or total > ROOM):
            break
        oldest = kept
    _forget(db, "< ?", oldest)


def _forget(db: Database, which: str, round: int | None) -> None:
    for table, column in _ROUND_OF.items():
        db.execute(f"DELETE FROM {table} WHERE {column} {which}", (round,))


def _listed(rounds: list[int]) -> str:
    return f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds))}"
