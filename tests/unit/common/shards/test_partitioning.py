"""Over how many partitions conversations are spread, when more were added since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.shards.partitioning import fitting
from penstock.schemas.topics import partition_for

IDS = st.sets(st.text("abcdef0123456789", min_size=1, max_size=12), max_size=60)


@given(ids=IDS, before=st.integers(1, 20), added=st.integers(0, 40))
def test_each_conversation_is_looked_for_where_it_stands(ids: set[str], before: int, added: int) -> None:
    places = [(one, partition_for(one.encode(), before)) for one in ids]
    found = fitting(places, before + added)
    assert all(partition_for(one.encode(), found) == partition for one, partition in places)
    if not ids or not added:
        assert found == before + added


def test_records_in_foreign_places_do_not_outvote_the_others() -> None:
    places = [(f"c{number}", partition_for(b"c%d" % number, 4)) for number in range(40)]
    foreign = [(f"x{number}", 7) for number in range(10)]
    assert fitting([*places, *foreign], 8) == 4
    assert fitting([*places[:1], *foreign[:1]], 4) == 4
