"""A socket's own submits: `accepted` is sent before the frames that a conversation has of the request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.routes.own_news import MAX_HELD, NewsOfOwn, Reply, Told
from penstock.gateway.view.frames import Frame, StatusFrame


def status(request_id: str, name: str = "queued") -> StatusFrame:
    return StatusFrame(request_id=request_id, cursor=None, status=name, done=False)


def reply(request_id: str) -> Reply:
    return Reply(request_id="", cursor=None, content={"type": "accepted", "request_id": request_id})


def told(request_id: str) -> Told:
    return Told(request_id=request_id, cursor=None)


def test_frames_of_a_request_wait_for_its_accepted() -> None:
    news = NewsOfOwn()
    news.hold("a")
    first, second, other, accepted = status("a"), status("a", "running"), status("b"), reply("a")
    taken = [news.in_order(one) for one in (first, other, second, accepted, told("a"), first)]
    assert taken == [[], [other], [], [accepted], [first, second], [first]]


def test_held_frames_are_bounded() -> None:
    news = NewsOfOwn()
    news.hold("a")
    frames = [status("a") for _ in range(MAX_HELD + 1)]
    sent = [one for frame in frames for one in news.in_order(frame)]
    assert len(sent) == MAX_HELD + 1
    assert news.in_order(told("a")) == []


@given(st.lists(st.tuples(st.sampled_from(["hold", "news", "told"]), st.sampled_from("ab")), max_size=60))
def test_no_frame_is_lost_repeated_or_reordered(steps: list[tuple[str, str]]) -> None:
    news, came, sent = NewsOfOwn(), list[Frame](), list[Frame]()
    under_way = {"a": 0, "b": 0}
    for step, request_id in steps:
        if step == "hold":
            under_way[request_id] += 1
            news.hold(request_id)
        elif step == "news":
            frame = status(request_id)
            came.append(frame)
            taken = news.in_order(frame)
            assert (taken == []) == (under_way[request_id] > 0)
            sent += taken
        elif under_way[request_id]:
            under_way[request_id] -= 1
            sent += news.in_order(told(request_id))
    for request_id, count in under_way.items():
        for _ in range(count):
            sent += news.in_order(told(request_id))
    for request_id in "ab":
        mine = [id(frame) for frame in came if frame.request_id == request_id]
        assert [id(frame) for frame in sent if frame.request_id == request_id] == mine
