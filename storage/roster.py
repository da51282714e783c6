"""The storage units of a queue as one client knows them, and its connections to them.

A unit is connected to when it is first needed, in a thread of its own: one that hangs holds up only those who need
it, and these no longer than they like to wait. A put needs none in particular: it goes on to another one.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from asyncflow.errors import QueueClosed, StorageError, UnitLost, WaitTimeout, WireError
from asyncflow.storage.arena import Slab, Writer
from asyncflow.storage.link import GRACE, SLACK
from asyncflow.storage.orders import AskUnits, UnitList
from asyncflow.storage.remote import RemoteLink

Connect: TypeAlias = Callable[[str, float], RemoteLink]
"""Makes a connection to an address within so many seconds."""

# So long puts leave a unit alone that did not greet.
_SHUNNED = 20.0


class Visit:
    """A request that waits for a connection to a unit; it goes on or fails, once."""

    def __init__(
        self,
        what: str,
        go: Callable[[RemoteLink], None],
        fail: Callable[[StorageError], None],
        *,
        anywhere: bool = False,
    ) -> None:
        """Say `what` waits; one that may go `anywhere` needs no unit in particular."""
        self.what, self.anywhere = what, anywhere
        self.unit = "a storage unit"
        """The unit that is waited for."""
        self.tried: set[int] = set()
        self._since = time.monotonic()
        self._ends = [(go, fail)]

    @property
    def over(self) -> bool:
        """Whether nobody waits any more."""
        return not self._ends

    def end(self, found: RemoteLink | StorageError) -> None:
        """Go on with a connection, or hear why there is none."""
        try:
            go, fail = self._ends.pop()
        except IndexError:
            return
        if isinstance(found, WaitTimeout):
            fail(UnitLost(self._waited()))
        elif isinstance(found, StorageError):
            fail(found)
        else:
            try:
                go(found)
            except StorageError as error:
                fail(error)

    def cancel(self) -> None:
        """Wait no longer than one that is well takes to greet: who has no time to wait may be the first who asks it."""
        left = SLACK - (time.monotonic() - self._since)
        if left > 0 and not self.over:
            timer = threading.Timer(left, self._give_up)
            timer.daemon = True
            timer.start()
        else:
            self._give_up()

    def _give_up(self) -> None:
        try:
            _, fail = self._ends.pop()
        except IndexError:
            return
        fail(WaitTimeout(self._waited()))

    def _waited(self) -> str:
        waited = time.monotonic() - self._since
        return f"{self.unit} does not answer: {self.what} waited {waited:.1f} s for a connection to it"


class Roster:
    """The units there are, by number, and the connections of one client to them."""

    def __init__(self, control: RemoteLink, timeout: float, connect: Connect) -> None:
        """Ask the controller for its units; a connection to one takes at most `timeout` seconds, and `GRACE`."""
        self._control, self._timeout, self._connect = control, timeout, connect
        self._lock = threading.Lock()
        self._links: dict[int, RemoteLink] = {}
        self._visits: dict[int, list[Visit]] = {}
        self._urls: dict[int, str] = {}
        self._shunned: dict[int, float] = {}
        """Until when puts leave a unit alone that was silent."""
        self._closed = False
        self.best = 0
        """The unit that the next put best goes to, by what the controller said last; 0 if there is none."""
        self._refresh()

    @property
    def next(self) -> int:
        """The unit that the next put goes to."""
        return self._choice(set()) or self.best

    def link(self, number: int) -> RemoteLink | None:
        """Return the connection to a unit, if there is one."""
        link = self._links.get(number)
        return link if link is not None and link.ended is None else None

    def writer(self) -> Writer:
        """Return the writer of the unit that the next put goes to; one without memory as long as it is a stranger."""
        link = self.link(self.next)
        return Writer(_nothing) if link is None else link.writer()

    def named(self, number: int) -> str:
        """Return what a unit is called in messages."""
        return f"storage unit {number} at {self._urls.get(number, 'an address that is asked for')}"

    def reach(self, number: int, visit: Visit) -> None:
        """Have a request go on once there is a connection to a unit."""
        visit.tried.add(number)
        visit.unit = self.named(number)
        with self._lock:
            link, closed = self.link(number), self._closed
            alone = number not in self._visits
            if link is None and not closed:
                self._visits.setdefault(number, []).append(visit)
        if closed:
            visit.end(QueueClosed(f"the client of {self._control.url} is closed"))
        elif link is not None:
            visit.end(link)
        elif alone:
            threading.Thread(target=self._greet, args=(number,), name="asyncflow-unit", daemon=True).start()

    def close(self) -> None:
        """End all connections, and the waits for them."""
        with self._lock:
            self._closed = True
            visits = [visit for each in self._visits.values() for visit in each]
        for visit in visits:
            visit.end(QueueClosed(f"the client of {self._control.url} is closed"))
        for link in list(self._links.values()):
            link.close()

    # In a thread for each unit that is connected to

    def _greet(self, number: int) -> None:
        """Connect to a unit for those who wait for it."""
        found, gone = self._first(number)
        stay = True
        if isinstance(found, WaitTimeout):
            stay = self._stay(number, found)
            found = self._attempt(number, min(GRACE, self._timeout)) if stay else found
        if stay:
            with self._lock:
                visits = self._visits.pop(number)
            self._end(visits, found)
        for link in gone:  # which may take a moment
            link.close()

    def _first(self, number: int) -> tuple[RemoteLink | StorageError, list[RemoteLink]]:
        try:
            gone = self._refresh()
        except StorageError as error:
            return error, []
        return self._attempt(number, min(SLACK, self._timeout)), gone

    def _refresh(self) -> list[RemoteLink]:
        """Ask where the units are; return the connections to those that have gone."""
        reply = self._control.send(AskUnits()).result(self._timeout)[0]
        if not isinstance(reply, UnitList):
            raise WireError(f"the answer is {type(reply).__name__}, not the units")
        with self._lock:
            self._urls, self.best = reply.units, reply.next
            return [
                self._links.pop(number)
                for number, link in list(self._links.items())
                if link.ended is not None or reply.units.get(number) != link.url
            ]

    def _attempt(self, number: int, timeout: float) -> RemoteLink | StorageError:
        """Connect to a unit; one that does not answer is a WaitTimeout, and shunned."""
        if number not in self._urls:
            which = f"storage unit {number} has gone" if self._urls else "none of its storage units can be reached"
            return UnitLost(f"{self._control.url}: {which}")
        try:
            link = self._connect(self._urls[number], timeout)
        except WaitTimeout as silence:
            with self._lock:
                self._shunned[number] = time.monotonic() + _SHUNNED
            return silence
        except StorageError as error:
            return error
        with self._lock:
            self._shunned.pop(number, None)
            if not self._closed:
                self._links[number] = link
                return link
        link.close()
        return QueueClosed(f"the client of {self._control.url} is closed")

    def _stay(self, number: int, silence: StorageError) -> bool:
        """Have those go elsewhere who can; return whether anybody waits for this unit still."""
        with self._lock:
            visits = [visit for visit in self._visits.pop(number, []) if not visit.over]
            stay = [visit for visit in visits if not visit.anywhere or not self._choice(visit.tried)]
            if stay:
                self._visits[number] = stay
        self._end([visit for visit in visits if visit not in stay], silence)
        return bool(stay)

    def _end(self, visits: list[Visit], found: RemoteLink | StorageError) -> None:
        """Have requests go on, to another unit if this one cannot be reached and they can, or fail."""
        for visit in visits:
            lost = isinstance(found, UnitLost | WaitTimeout)
            other = self._choice(visit.tried) if lost and visit.anywhere else 0
            if other:
                self.reach(other, visit)
            else:
                visit.end(found)

    def _choice(self, but: set[int]) -> int:
        """Return the unit that a put best goes to of those that are not silent; 0 for none."""
        now, but = time.monotonic(), {0, *but}
        fit = (each for each in (self.best, *self._urls) if each not in but and self._shunned.get(each, 0) <= now)
        return next(fit, 0)


def _nothing(nbytes: int, left: list[int]) -> Slab | None:
    return None
