"""Trees of conversations in exported files, and the steps that build one at a gateway. Pure.

Nothing is remembered of an import: each time the steps follow from what the file says and what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.cli.exported import Section
from penstock.cli.failures import CliFailure


@dataclass(kw_only=True, slots=True)
class Tree:
    """Conversations of a file that go on from one another, each after what it goes on from."""

    sections: list[Section] = field(default_factory=list["Section"])
    made_of: dict[str, tuple[str, int] | None] = field(default_factory=dict[str, "tuple[str, int] | None"])
    """By id: the conversation that holds the last message that it inherits, and that message's number among those
    which that one adds to its own, from 1. None: it inherits none."""

    def forks_of(self, section_id: str) -> list[str]:
        """The ids of those that go on from messages of this one."""
        return [name for name, made_of in self.made_of.items() if made_of is not None and made_of[0] == section_id]

    def leave_out_unneeded(self) -> None:
        """Leave out what is deleted and holds nothing of others."""
        for section in reversed(self.sections.copy()):
            if section.is_deleted and not self.forks_of(section.id):
                self.sections.remove(section)
                del self.made_of[section.id]


def trees(sections: Sequence[Section]) -> list[Tree]:
    """The trees of a file. Raises CliFailure unless each is whole.

    A fork that inherits nothing, as all of it was erased, is a conversation of its own. A deleted one of which nothing
    is left that others inherit is left out.
    """
    found: list[Tree] = []
    by_id: dict[str, tuple[Section, Tree]] = {}
    left = 0
    for section in sections:
        if section.parent_id is None:
            _require_all(left)
            by_id, left = {}, section.head.get("forks", 0)
        else:
            left -= 1
            if section.parent_id not in by_id or section.id in by_id or left < 0:
                raise CliFailure(f"line {section.line}: {section.id} does not stand behind what it goes on from")
        made_of = _made_of(section, by_id)
        tree = Tree() if made_of is None else by_id[made_of[0]][1]
        if made_of is None:
            found.append(tree)
        tree.sections.append(section)
        tree.made_of[section.id] = made_of
        by_id[section.id] = section, tree
    _require_all(left)
    for tree in found:
        tree.leave_out_unneeded()
    return [tree for tree in found if tree.sections]


def _require_all(left: int) -> None:
    if left > 0:
        raise CliFailure(f"{left} forks are missing at the end of their tree: export it again")


def _made_of(section: Section, by_id: Mapping[str, tuple[Section, Tree]]) -> tuple[str, int] | None:
    name = section.parent_id
    while name is not None:
        parent = by_id[name][0]
        if (number := section.inherited - parent.inherited) > 0:
            if number > parent.messages:
                raise CliFailure(f"line {section.line}: {section.id} inherits more than {name} has")
            return name, number
        name = parent.parent_id
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A conversation of a tree as it is at the gateway."""

    log_id: str
    is_deleted: bool
    done: int
    """How many messages of the file are there."""
    offsets: Sequence[int]
    """Of the messages that it adds to what it inherits, also those that the file does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Make:
    """Begin a conversation; with `parent_id`, an id of the file, as a fork through the offset `through`."""

    section: Section
    parent_id: str | None = None
    through: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Append:
    """Append what is missing."""

    section: Section
    found: Found


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete:
    """Delete what was deleted where the file comes from: all that goes on from it is there."""

    section: Section


Step = Make | Append | Delete


def steps(tree: Tree, found: Mapping[str, Found]) -> list[Step]:
    """What can be done now, in any order; none: the tree is there. Raises CliFailure for what cannot be done."""
    return [step for section in tree.sections for step in _steps_of(tree, section, found)]


def _steps_of(tree: Tree, section: Section, found: Mapping[str, Found]) -> Iterator[Step]:
    here, made_of = found.get(section.id), tree.made_of[section.id]
    if here is None:
        if made_of is None:
            yield Make(section=section)
        elif (parent := found.get(made_of[0])) is not None and parent.done >= made_of[1]:
            if parent.is_deleted:
                raise CliFailure(f"{section.id} cannot go on from {made_of[0]}, which is deleted here")
            yield Make(section=section, parent_id=made_of[0], through=parent.offsets[made_of[1] - 1])
    elif here.done < section.messages:
        if here.is_deleted:
            raise CliFailure(f"{section.id} is deleted here, and messages of it are missing")
        yield Append(section=section, found=here)
    elif section.is_deleted and not here.is_deleted and all(one in found for one in tree.forks_of(section.id)):
        if len(here.offsets) > section.messages:
            raise CliFailure(f"{section.id} is not deleted, as the file says: it was gone on with here")
        yield Delete(section=section)
