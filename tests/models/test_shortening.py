"""Inputs that are cut in front of an engine: as TextGenerator cuts them, and told."""

import asyncio

import pytest

from ctxflow.errors import ItemRefused
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS, OpenAIEngine
from ctxflow.models.reading import Reader, render_chat, tokenize
from ctxflow.models.results import InputTooLong
from ctxflow.models.shortening import ShorteningEngine

LONG = "Numbers such as 0, 1, 2 appear in claims about people. "
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": LONG * 9},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": [{"type": "text", "text": "Is it?"}]},
]


class Inner:
    """Stands where vLLM would: tells what it was asked."""

    closed = False

    async def answer(self, endpoint, body):
        return {"asked": (endpoint, body)}

    async def aclose(self):
        self.closed = True


def ask(causal_lm, endpoint, body, too_long="cut-start", length=120, most=None):
    engine = ShorteningEngine(Inner(), causal_lm.tokenizer, length, most, too_long)
    assert isinstance(engine, OpenAIEngine)
    return asyncio.run(engine.answer(endpoint, body))


def test_what_fits_passes_untouched(causal_lm):
    for endpoint, asked in ((COMPLETIONS, {"prompt": "short"}), (CHAT, {"messages": TALK[-1:]}),
                           (EMBEDDINGS, {"input": LONG * 20}), (COMPLETIONS, {"prompt": [1] * 500})):  # fmt: skip
        body = {**asked, "max_tokens": 5}
        assert ask(causal_lm, endpoint, body) == {"asked": (endpoint, body)}
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": LONG * 20}]}]
    assert "truncated" not in ask(causal_lm, CHAT, {"messages": picture, "max_tokens": 5})


@pytest.mark.parametrize("too_long", ["cut-start", "cut-end"])
def test_prompts_and_conversations_are_cut_as_the_generator_cuts_them(causal_lm, too_long):
    tokenizer = causal_lm.tokenizer
    reader = Reader(tokenizer, 120, None, too_long)
    found = ask(causal_lm, COMPLETIONS, {"prompt": LONG * 20, "max_tokens": 7}, too_long)
    ([expected], _) = reader.prompts([LONG * 20], {"max_new_tokens": 7})
    assert found["asked"][1] == {"prompt": expected.ids, "max_tokens": 7} and len(expected.ids) == 113
    assert (found["truncated"], found["original_prompt_tokens"]) == (True, expected.original)
    for talk in (TALK, [{"role": "user", "content": LONG * 20}]):
        found = ask(causal_lm, CHAT, {"messages": talk, "max_completion_tokens": 7}, too_long)
        ([expected], _) = reader.chats([talk], None, {"max_new_tokens": 7})
        [ids] = tokenize(tokenizer, render_chat(tokenizer, [found["asked"][1]["messages"]]), add_special_tokens=False)
        assert ids == expected.ids and found["original_prompt_tokens"] == expected.original


def test_what_is_not_to_be_cut_is_told_with_both_numbers(causal_lm):
    for endpoint, body in ((COMPLETIONS, {"prompt": LONG * 20}), (CHAT, {"messages": TALK})):
        with pytest.raises(InputTooLong, match=r"has \d+ tokens, but 30 fit \(max_input_tokens=30\)") as caught:
            ask(causal_lm, endpoint, {**body, "max_tokens": 5}, "error", most=30)
        assert isinstance(caught.value, ItemRefused), "it is dead at once"


def test_a_template_that_refuses_is_the_rows_own_fault(causal_lm, monkeypatch):
    monkeypatch.setattr(causal_lm.tokenizer, "chat_template", "{{ raise_exception('no system') }}")
    with pytest.raises(ItemRefused, match=r"refuses .* change its roles or contents"):
        ask(causal_lm, CHAT, {"messages": TALK, "max_tokens": 5})


def test_the_engine_behind_it_is_ended(causal_lm):
    inner = Inner()
    asyncio.run(ShorteningEngine(inner, causal_lm.tokenizer, 120, None, "cut-end").aclose())
    assert inner.closed
