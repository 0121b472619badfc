from __future__ import annotations

import types

import pytest

from ctxflow.models.reading import check_texts, context_length, render_chat, tokenize


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
