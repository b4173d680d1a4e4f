"""The ledger: who may use how much memory of which device. Reserved plus foreign use never passes a limit by a grant.

A grant or None, never an exception for "not now" (after vLLM's allocate_slots). What can never fit is refused at once.
A reservation keeps room for one who has waited too long, as EASY backfilling does for the job at the head (Lifka, "The
ANL/IBM SP scheduling system", 1995).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.schemas.errors import EngineFailed, InsufficientCapacity, RetryKind


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCapacity:
    """A device and what of it may never be granted (`reserve_bytes`: the system's and other programs' share)."""

    device: str
    kind: str
    total_bytes: int
    reserve_bytes: int = 0

    @property
    def limit_bytes(self) -> int:
        return max(0, self.total_bytes - self.reserve_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGrant:
    """Memory given to an owner on one device or several; to be released exactly once.

    `needs` is what was granted at first; `Ledger.held_bytes` says what it is after `resize`.
    """

    number: int
    owner: str
    needs: Mapping[str, int]

    @property
    def device(self) -> str:
        """The first device of its needs."""
        return next(iter(self.needs))

    @property
    def bytes(self) -> int:
        """What was granted on the first device."""
        return self.needs[self.device]


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """What a grant holds on one device; `measured_bytes` None until its use was measured."""

    owner: str
    bytes: int
    measured_bytes: int | None


class CannotLoad(EngineFailed):
    """Loading it again would fail again: somebody has to mend its configuration or its files."""


class OutOfMemory(EngineFailed):
    """Its device had less memory than it took, in spite of its grant: it needs a larger one, or smaller batches."""

    retry_kind = RetryKind.PUT_BACK


class IllegalRelease(RuntimeError):
    """A grant was released twice, or was never given."""


@dataclass(slots=True)
class _Reservation:
    """Room kept for one owner; nobody else is granted it before `until`."""

    owner: str
    bytes: int
    since: float
    until: float

    @property
    def length_s(self) -> float:
        return self.until - self.since


class _Device:
    __slots__ = (
        "by_holders_bytes",
        "capacity",
        "foreign_bytes",
        "held",
        "measured",
        "observed",
        "overruns_bytes",
        "reservation",
        "reserved_bytes",
    )

    def __init__(self, capacity: DeviceCapacity) -> None:
        self.capacity = capacity
        self.observed = False
        self.reserved_bytes = 0
        self.foreign_bytes = 0
        """Measured use that no holder explains."""
        self.by_holders_bytes = 0
        """Measured use of all who hold grants."""
        self.held: dict[int, int] = {}
        self.measured: dict[int, int] = {}
        self.overruns_bytes = 0
        """Sum over holders of what each was measured to use beyond its grant."""
        self.reservation: _Reservation | None = None

    @property
    def overrun_bytes(self) -> int:
        """What holders were measured to use beyond their grants: nobody else may have it."""
        return max(self.overruns_bytes, self.by_holders_bytes - self.reserved_bytes, 0)

    @property
    def taken_bytes(self) -> int:
        return self.reserved_bytes + self.foreign_bytes + self.overrun_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity.limit_bytes - self.taken_bytes) if self.observed else 0

    def free_for(self, owner: str, now: float) -> int:
        kept = self.reservation
        if kept is None or kept.owner == owner or now >= kept.until:
            return self.free_bytes
        return max(0, self.free_bytes - kept.bytes)

    def set_held(self, number: int, need_bytes: int) -> None:
        """What is given back was measured too, most likely: it is no overrun of others until it is measured again."""
        before = self.held.pop(number, 0)
        used = self.measured.get(number)
        if used is not None:
            self.overruns_bytes += max(0, used - need_bytes) - max(0, used - before)
        self.reserved_bytes += need_bytes - before
        if need_bytes:
            self.held[number] = need_bytes
        if need_bytes < before:
            self.by_holders_bytes = max(0, self.by_holders_bytes + need_bytes - before)

    def set_measured(self, number: int, used_bytes: int) -> None:
        held = self.held.get(number, 0)
        self.overruns_bytes += max(0, used_bytes - held) - max(0, self.measured.get(number, 0) - held)
        self.measured[number] = used_bytes

    def forget(self, number: int) -> None:
        if number in self.measured:
            self.set_measured(number, 0)
            del self.measured[number]
        if number in self.held:
            self.set_held(number, 0)


class Ledger:
    """Grants against devices, all or nothing over several of them. Times are seconds of the caller's clock.

    `longest_reservation_s`: a first reservation keeps room from small ones for no longer than this.
    """

    def __init__(self, devices: Sequence[DeviceCapacity], *, longest_reservation_s: float = 30.0) -> None:
        self._devices = {capacity.device: _Device(capacity) for capacity in devices}
        self._grants: dict[int, MemoryGrant] = {}
        self._number = 0
        self._longest_reservation_s = longest_reservation_s

    # -- what is measured

    def observe(self, device: str, used_bytes: int, by_grants_bytes: int = 0) -> None:
        """What a probe measured in all, and how much of it belongs to holders of grants."""
        held = self._devices[device]
        held.observed = True
        held.foreign_bytes = max(0, used_bytes - by_grants_bytes)
        held.by_holders_bytes = by_grants_bytes

    def unobserve(self, device: str) -> None:
        """It cannot be measured any more: what was measured last stays, and nothing is granted until it is again."""
        self._devices[device].observed = False

    def observed(self, device: str) -> bool:
        """Whether its use is known; nothing is granted on it otherwise."""
        return self._devices[device].observed

    def measure(self, grant: MemoryGrant, device: str, used_bytes: int) -> None:
        """What this holder was measured to use. Beyond its grant it counts as taken. Raises IllegalRelease."""
        self._check_held(grant)
        self._devices[device].set_measured(grant.number, used_bytes)

    # -- grants

    def grant(
        self, owner: str, needs: Mapping[str, int], now: float, *, reserved_as: str | None = None
    ) -> MemoryGrant | None:
        """Reserve these bytes on each of these devices; None when one of them does not fit now.

        `reserved_as`: the owner that the room was kept for, if that has another name.
        None too for a device that is not observed. Raises ValueError for no needs, a negative one, or a device
        that is not here.
        """
        if not needs or any(need < 0 or device not in self._devices for device, need in needs.items()):
            raise ValueError(f"cannot grant {dict(needs)}")
        claimant = reserved_as or owner
        for device, need in needs.items():
            held = self._devices[device]
            if not held.observed or need > held.free_for(claimant, now):
                return None
        self._number += 1
        grant = MemoryGrant(number=self._number, owner=owner, needs=dict(needs))
        self._grants[grant.number] = grant
        for device, need in needs.items():
            self._devices[device].set_held(grant.number, need)
        self.cancel_reservations(claimant)
        return grant

    def resize(self, grant: MemoryGrant, device: str, need_bytes: int, now: float) -> bool:
        """Change what a grant holds on a device: down always, up only if it fits now. Raises IllegalRelease."""
        self._check_held(grant)
        held = self._devices[device]
        more = need_bytes - held.held.get(grant.number, 0)
        if more > 0 and (not held.observed or more > held.free_for(grant.owner, now)):
            return False
        held.set_held(grant.number, need_bytes)
        return True

    def release(self, grant: MemoryGrant) -> None:
        """Give all of it back. Raises IllegalRelease."""
        self._check_held(grant)
        del self._grants[grant.number]
        for held in self._devices.values():
            held.forget(grant.number)

    def _check_held(self, grant: MemoryGrant) -> None:
        if self._grants.get(grant.number) is not grant:
            raise IllegalRelease(f"grant {grant.number} of {grant.owner} is not held")

    # -- reservations

    def reserve(self, device: str, need_bytes: int, for_owner: str, until: float, now: float) -> bool:
        """Keep room for an owner that has waited too long; whether room is kept for it now.

        A device keeps room for one owner at a time. Small ones are delayed by `longest_reservation_s` at most. When
        that was not enough (what runs there runs longer), they pass for as long as they were held back, then the same
        owner may reserve for twice as long: so it gets its room in the end, and they have half of the time. No bytes:
        it does not wait here any more.
        """
        held = self._devices[device]
        last = held.reservation
        if need_bytes == 0:
            if last is not None and last.owner == for_owner:
                held.reservation = None
            return False
        longest = self._longest_reservation_s
        if last is not None and now < last.until:
            if last.owner == for_owner:
                last.bytes = need_bytes
            return last.owner == for_owner
        if last is not None and now < last.until + last.length_s:
            return False
        if last is not None and last.owner == for_owner:
            longest = max(longest, 2 * last.length_s)
        held.reservation = _Reservation(for_owner, need_bytes, now, min(until, now + longest))
        return True

    def cancel_reservations(self, owner: str) -> None:
        """It does not wait any more, or has got its room somewhere."""
        for held in self._devices.values():
            if held.reservation is not None and held.reservation.owner == owner:
                held.reservation = None

    def reservation(self, device: str, now: float) -> tuple[str, int, float] | None:
        """The owner that room of a device is kept for, how many bytes, and until when."""
        kept = self._devices[device].reservation
        return None if kept is None or now >= kept.until else (kept.owner, kept.bytes, kept.until)

    # -- reading

    def fits_ever(self, needs: Mapping[str, int]) -> bool:
        """Whether the devices could hold it, were they empty."""
        return all(device in self._devices and need <= self.limit_bytes(device) for device, need in needs.items())

    def insufficient(self, what: str, needs: Mapping[str, int]) -> InsufficientCapacity:
        """The error for what can never fit, naming need and capacity of the device that is too small by most."""
        limits = {device: self.limit_bytes(device) if device in self._devices else 0 for device in needs}
        device = max(needs, key=lambda name: needs[name] - limits[name])
        need, capacity = needs[device], limits[device]
        return InsufficientCapacity(
            f"{what} needs {need / 2**20:.0f} MiB on {device}; it grants {capacity / 2**20:.0f} MiB at most",
            details={"need": need, "capacity": capacity, "unit": "bytes"},
        )

    def devices(self) -> list[DeviceCapacity]:
        return [held.capacity for held in self._devices.values()]

    def grants(self) -> list[MemoryGrant]:
        return list(self._grants.values())

    def limit_bytes(self, device: str) -> int:
        return self._devices[device].capacity.limit_bytes

    def free_bytes(self, device: str) -> int:
        """What is not granted or used; 0 while it is not observed."""
        return self._devices[device].free_bytes

    def free_for(self, device: str, owner: str, now: float) -> int:
        """What could be granted to an owner now: what is free, less what is reserved for others."""
        return self._devices[device].free_for(owner, now)

    def reserved_bytes(self, device: str) -> int:
        """Granted bytes."""
        return self._devices[device].reserved_bytes

    def held_bytes(self, grant: MemoryGrant, device: str) -> int:
        return self._devices[device].held.get(grant.number, 0)

    def comes_back_bytes(self, grant: MemoryGrant, device: str) -> int:
        """What is free for others again once it is released: what it holds, or was measured to use beyond that."""
        held = self._devices[device]
        return max(held.held.get(grant.number, 0), held.measured.get(grant.number, 0))

    def foreign_bytes(self, device: str) -> int:
        """Measured use that no holder of a grant explains."""
        return self._devices[device].foreign_bytes

    def measured_bytes(self, device: str) -> int:
        """Measured use of those who hold grants."""
        held = self._devices[device]
        return max(held.by_holders_bytes, sum(held.measured.values()))

    def over_bytes(self, device: str) -> int:
        """By how much more is taken than the limit allows: foreign use has grown since the grants."""
        held = self._devices[device]
        return max(0, held.taken_bytes - held.capacity.limit_bytes)

    def holders(self, device: str) -> list[HeldMemory]:
        """Who holds how much of a device, in the order of the grants."""
        held = self._devices[device]
        return [
            HeldMemory(self._grants[number].owner, need, held.measured.get(number))
            for number, need in sorted(held.held.items())
        ]
