"""What an ordinary start waits for, as distinct from what somebody must mend."""

from __future__ import annotations


class Starting(str):
    """A reason why a process does not work yet that ends by itself. Text that is made of it is a reason as others."""

    __slots__ = ()
