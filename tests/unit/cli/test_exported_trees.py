"""The steps that build a tree of conversations, against a gateway in memory: any tree, interrupted anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.exported import Section
from penstock.cli.exported_trees import Append, Delete, Found, Make, Step, Tree, steps, trees
from penstock.cli.failures import CliFailure


def section(
    name: str, messages: int, parent: str | None = None, inherited: int = 0, *, deleted: bool = False, forks: int = 0
) -> Section:
    head: dict[str, Any] = {"id": name, "messages": messages, "summaries": 0, "log_id": f"log-{name}"}
    if parent is None:
        head["forks"] = forks
    else:
        head["forked_from"] = {"conversation_id": parent, "through": 0, "messages": inherited}
    if deleted:
        head["deleted"] = True
    return Section(head=head, line=1, start=0, messages=messages)


@dataclass
class Copies:
    """Conversations as lists of texts, copied when one is forked. Offsets are places in these lists, from 100 on."""

    whole: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    inherited: dict[str, int] = field(default_factory=dict[str, int])
    deleted: set[str] = field(default_factory=set[str])

    def look(self) -> dict[str, Found]:
        return {
            name: Found(
                log_id=f"log-{name}",
                is_deleted=name in self.deleted,
                done=len(texts) - self.inherited[name],
                offsets=range(100 + self.inherited[name], 100 + len(texts)),
            )
            for name, texts in self.whole.items()
        }

    def heirs(self, name: str) -> list[list[str]]:
        return [texts[: self.inherited[other]] for other, texts in self.whole.items() if other != name]

    def do(self, step: Step) -> None:
        name = step.section.id
        match step:
            case Make(parent_id=None):
                assert name not in self.whole
                self.whole[name], self.inherited[name] = [], 0
            case Make(parent_id=str(parent), through=through):
                assert name not in self.whole
                assert parent not in self.deleted
                self.whole[name] = self.whole[parent][: through - 99]
                self.inherited[name] = len(self.whole[name])
            case Append(found=found):
                assert found.done < step.section.messages
                self.whole[name] += [f"{name} {number}" for number in range(found.done, step.section.messages)]
            case Delete():
                assert any(one.startswith(f"{name} ") for texts in self.heirs(name) for one in texts), "else it is gone"
                self.deleted.add(name)
            case _:
                raise AssertionError(step)


@st.composite
def files(draw: st.DrawFn) -> list[Section]:
    """A tree as an export writes it; what is deleted has forks."""
    count = draw(st.integers(2, 8))
    made = [section("c0", draw(st.integers(1, 4)), forks=count - 1)]
    for number in range(1, count):
        parent = made[draw(st.integers(0, number - 1))]
        inherited = draw(st.integers(0, parent.inherited + parent.messages))
        made.append(section(f"c{number}", draw(st.integers(0, 4)), parent.id, inherited))
    for one in made:
        if draw(st.booleans()) and any(other.parent_id == one.id for other in made):
            one.head["deleted"] = True
    return made


def expected(made: list[Section]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in made:
        inherited = [] if one.parent_id is None else found[one.parent_id][: one.inherited]
        found[one.id] = inherited + [f"{one.id} {number}" for number in range(one.messages)]
    return found


def build(tree: Tree, copies: Copies, most_steps: int) -> None:
    while todo := steps(tree, copies.look()):
        for step in todo:
            if most_steps <= 0:
                return
            copies.do(step)
            most_steps -= 1


@given(files(), st.integers(0, 30))
def test_any_tree_is_built_also_if_it_is_interrupted(made: list[Section], cut_after: int) -> None:
    copies = Copies()
    for tree in trees(made):
        build(tree, copies, cut_after)
        build(tree, copies, 1_000)
        for one in tree.sections:
            assert copies.whole[one.id] == expected(made)[one.id]
            assert (one.id in copies.deleted) == one.is_deleted
    assert {one.id for one in made if not one.is_deleted} <= copies.whole.keys()


def test_a_fork_through_an_inherited_message_is_one_of_the_conversation_that_holds_it() -> None:
    (tree,) = trees([section("a", 3, forks=2), section("b", 2, "a", 2), section("c", 0, "b", 1)])
    assert tree.made_of == {"a": None, "b": ("a", 2), "c": ("a", 1)}


def test_a_fork_that_inherits_nothing_is_a_separate_conversation() -> None:
    found = trees([section("a", 0, deleted=True, forks=2), section("b", 2, "a", 0), section("c", 1, "b", 2)])
    assert [[one.id for one in tree.sections] for tree in found] == [["b", "c"]]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([section("a", 1, forks=2), section("b", 1, "a", 1)], "1 forks are missing"),
        ([section("a", 1, forks=1), section("b", 1)], "1 forks are missing"),
        ([section("a", 1), section("b", 1, "a", 1)], "b does not stand behind"),
        ([section("a", 1, forks=1), section("b", 1, "x", 1)], "b does not stand behind"),
        ([section("a", 1, forks=1), section("a", 1, "a", 1)], "a does not stand behind"),
        ([section("a", 1, forks=1), section("b", 1, "a", 2)], "b inherits more than a has"),
    ],
)
def test_an_incomplete_tree_is_refused(made: list[Section], said: str) -> None:
    with pytest.raises(CliFailure, match=said):
        trees(made)


def there(done: int, *, deleted: bool = False, more: int = 0) -> Found:
    return Found(log_id="L", is_deleted=deleted, done=done, offsets=range(done + more))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": there(2, deleted=True)}, "b cannot go on from a, which is deleted here"),
        ({"a": there(1, deleted=True), "b": there(0)}, "messages of it are missing"),
        ({"a": there(2, more=1), "b": there(1)}, "it was gone on with here"),
    ],
)
def test_a_tree_that_cannot_be_built_is_refused(found: Mapping[str, Found], said: str) -> None:
    (tree,) = trees([section("a", 2, deleted=True, forks=1), section("b", 1, "a", 2)])
    with pytest.raises(CliFailure, match=said):
        steps(tree, found)
