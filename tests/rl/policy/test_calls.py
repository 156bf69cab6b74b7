"""The ids of the next context: which call a conversation continues, and what becomes of its answer."""

import numpy as np
import pytest

from ptf.data.trajectory import Generation
from ptf.rl.policy.calls import Call, CallHistory, NoRoom, normalised
from tests.data.templates import templated
from tests.rl.endpoint.served import said, user

TOOL_CALL = '<tool_call>\n{"name":  "f", "arguments": {"a":1}}\n</tool_call>'


def called(arguments='{"a": 1}'):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Episode:
    """Calls of one history; answers are encoded letter by letter, as no encoder would."""

    def __init__(self, name="plain", length=4000):
        self.tokenizer = templated(name)
        self.history, self.number = CallHistory(self.tokenizer, {}, length), 0

    def ask(self, messages, text, message=None, received=True, finished=True, tools=None):
        context = self.history.context(messages, tools)
        ids = [i for letter in text for i in self.tokenizer.encode(letter)]
        ids += [self.tokenizer.stop_ids[0]] if finished else []
        n = len(ids)
        generation = Generation(
            context.tokens, np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), finished
        )
        raw = self.tokenizer.decode(ids)
        call = Call(self.number, context, generation, text, raw, finished, True, message or said(text))
        self.number += 1
        if received:
            self.history.add(call)
        return call

    def begins_with(self, context, call):
        start = [*call.context.tokens, *call.generation.sampled_ids]
        return context.tokens[: len(start)].tolist() == start


def test_a_context_begins_with_the_ids_of_the_longest_call():
    e = Episode()
    first = e.ask([user("a")], "one")
    second = e.ask([user("a"), said("one"), user("b")], "two")
    assert e.begins_with(second.context, first)
    third = e.history.context([user("a"), said("one"), user("b"), said("two"), user("c")])
    assert e.begins_with(third, second)
    branch = e.history.context([user("a"), said("one"), user("other")])
    assert e.begins_with(branch, first)
    assert not e.begins_with(branch, second)
    assert (e.history.history_restored, e.history.history_reencoded) == (0, 0)
    for context in (third, branch):
        assert e.tokenizer.decode(context.tokens) == context.text
        assert context.tokens.tolist() != e.tokenizer.encode(context.text)


def test_another_text_is_another_context():
    e = Episode()
    first = e.ask([user("a")], "one")
    context = e.history.context([user("a"), said("two"), user("b")])
    assert not e.begins_with(context, first)
    assert context.tokens.tolist() == e.tokenizer.encode(context.text)


@pytest.mark.parametrize(
    ("arguments", "same"), [('{"a": 1}', True), ('{"a":1}', True), ('{ "a" : 1 }', True), ('{"a": 2}', False)]
)
def test_tool_calls_in_another_form_are_spliced_and_others_are_not(arguments, same):
    e = Episode()
    first = e.ask([user("a")], TOOL_CALL, called())
    context = e.history.context([user("a"), called(arguments), {"role": "tool", "content": "x"}])
    assert e.begins_with(context, first) == (TOOL_CALL in context.text) == same
    assert e.history.history_restored == int(same)
    assert e.history.history_reencoded == 0 or not same


def test_thinking_that_a_template_drops_is_rewritten_and_one_that_it_shows_is_spliced():
    for name, counts in (("plain", (1, 0)), ("drops_thinking", (0, 1))):
        e = Episode(name)
        first = e.ask([user("a")], "<think>\nx\n</think>\n\none", said("one"))
        context = e.history.context([user("a"), said("one"), user("b")])
        assert e.begins_with(context, first) == (name == "plain")
        assert (e.history.history_restored, e.history.history_reencoded) == counts


def test_of_equal_branches_the_latest_is_continued_in_any_order_of_arrival():
    e = Episode()
    first = e.ask([user("a")], "one", received=False)
    second = e.ask([user("a")], "one", received=False)
    e.history.add(second)
    e.history.add(first)
    context = e.history.context([user("a"), said("one"), user("b")])
    assert e.begins_with(context, second)
    assert e.history.history_reencoded == 0
    assert not first.continued
    assert not second.continued  # the text is no evidence for either


def test_a_lost_answer_is_continued_by_none_until_it_is_sent_back():
    e = Episode()
    first = e.ask([user("a")], "one")
    other = e.ask([user("a")], "two")
    assert e.history.lose([first])
    assert e.history.calls == [other]
    assert not e.begins_with(e.history.context([user("a")]), first)
    context = e.history.context([user("a"), said("one"), user("b")])
    assert e.begins_with(context, first)
    assert sorted(call.number for call in e.history.calls) == [0, 1]
    assert not e.history.lose([first])  # the conversation holds it


def test_a_lost_answer_is_not_regained_by_what_a_client_may_have_written_itself():
    e = Episode()
    empty, twin = e.ask([user("a")], ""), e.ask([user("b")], "ok")
    assert e.history.lose([empty])
    e.history.context([user("a"), said(""), user("c")])
    assert empty not in e.history.calls
    cut = e.ask([user("b")], "ok", finished=False)  # the same text was received
    assert e.history.lose([twin])
    e.history.context([user("b"), said("ok"), user("c")])
    assert e.history.calls == [cut]


def test_choices_of_one_request_are_lost_and_regained_together():
    e = Episode()
    both = [e.ask([user("a")], text) for text in ("one", "two")]
    assert e.history.lose(both)
    e.history.context([user("a"), said("two"), user("b")])
    assert e.history.calls == both


def test_a_delivery_after_a_loss_counts_once():
    e = Episode()
    first = e.ask([user("a")], "one")
    e.history.lose([first])
    e.history.add(first)
    e.history.add(first)
    assert e.history.calls == [first]
    assert e.history.lost == []


def test_a_text_that_is_far_too_long_is_not_encoded(monkeypatch):
    e = Episode(length=16)
    monkeypatch.setattr(e.tokenizer, "encode", lambda text: pytest.fail("it was encoded"))
    with pytest.raises(NoRoom, match="1000"):
        e.history.context([user("word " * 200_000)])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (said(" a\n"), said("a"), True),
        (said("<think>x</think>a"), said("a"), True),
        ({**said("a"), "reasoning_content": "x"}, said("a"), True),
        (called('{"a":1,"b":2}'), called('{"b": 2, "a": 1}'), True),
        ({**called(), "content": None}, called(), True),
        (called("not JSON"), called("not JSON"), True),
        (said("a"), user("a"), False),
        (said("a"), said("b"), False),
        (called(), called('{"a": "1"}'), False),
        (called(), said(""), False),
    ],
)
def test_messages_are_recognised_by_their_content(one, other, same):
    assert (normalised(one) == normalised(other)) == same
