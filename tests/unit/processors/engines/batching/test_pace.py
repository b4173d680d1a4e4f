"""How much of prompts a step computes beside runs that are more urgent."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.batching.pace import LEAST_PROMPT_TOKENS, STEP_S, Pace


def run(pace: Pace, *, plain_s: float, token_s: float, most: int, steps: int = 100) -> int:
    """Steps with what the pace allows, each tenth without prompts. Returns the tokens of prompts of the last one."""
    tokens = most
    for step in range(steps):
        if step % 10 == 0:
            pace.observe(4, 0, plain_s)
            continue
        tokens = min(most, pace.prompt_tokens or most)
        pace.observe(4, tokens, plain_s + tokens * token_s)
    return tokens


def test_nothing_is_bounded_before_a_prompt_was_measured() -> None:
    pace = Pace()
    assert pace.prompt_tokens is None
    pace.observe(3, 0, 0.1)
    assert pace.prompt_tokens is None


@given(plain_s=st.floats(0.001, 1.0), token_s=st.floats(0.00001, 0.1), first=st.floats(0.0, 20.0))
def test_it_finds_the_size_whose_steps_take_as_long_as_they_may(plain_s: float, token_s: float, first: float) -> None:
    """Also after a first step that took very long, as first ones do, and never with less and less."""
    pace = Pace()
    pace.observe(0, 512, first)
    tokens = run(pace, plain_s=plain_s, token_s=token_s, most=4096)
    allowed = max(LEAST_PROMPT_TOKENS, min(4096, (STEP_S - plain_s) / token_s))
    assert 0.95 * allowed - 1 <= tokens <= 1.05 * allowed + 1
