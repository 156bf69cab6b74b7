"""Random agents before the endpoint: what was received is what is trained. `make fuzz-endpoint` plays many more."""

from dataclasses import replace

import pytest

from ptf.rl.endpoint.session import Session
from tests.data.templates import templated
from tests.rl.endpoint.fuzz import fuzz


@pytest.mark.parametrize(("name", "first"), [("plain", 0), ("drops_thinking", 100), ("thinking_switch", 200)])
def test_what_was_received_is_trained_once_with_the_ids_that_were_served(name, first):
    report = fuzz(templated(name), range(first, first + 3), calls=25)
    assert report.violations == []
    assert report.calls >= 75
    assert min(report.counts["undelivered"], report.counts["retries"]) > 0


class Careless(Session):
    """Trains answers although their clients did not receive them."""

    def lose(self, exchange):
        pass


class Eager(Session):
    """Counts an answer as delivered as soon as it is asked for."""

    def exchange(self, request, chat):
        exchange = super().exchange(request, chat)
        exchange.task.add_done_callback(lambda _: self.closed or self.deliver(exchange))
        return exchange


@pytest.mark.parametrize("session", [Careless, Eager])
def test_sessions_that_train_what_was_not_received_are_caught(session):
    found = fuzz(templated("plain"), range(3), calls=25, session=session).violations
    assert any("is trained and was not received" in fault for fault in found)


def twice(trajectory):
    return replace(trajectory, generations=(*trajectory.generations, trajectory.generations[0]))


def lost(trajectory):
    return replace(trajectory, generations=trajectory.generations[:-1])


def other_ids(trajectory):
    first, *rest = trajectory.generations
    return replace(trajectory, generations=(replace(first, sampled_ids=first.sampled_ids ^ 1), *rest))


def other_context(trajectory):
    first, *rest = trajectory.generations
    return replace(trajectory, generations=(replace(first, context=first.context ^ 1), *rest))


@pytest.mark.parametrize(
    ("tamper", "fault"),
    [
        (twice, "with other ids, or not once"),
        (other_ids, "with other ids, or not once"),
        (lost, "was received and is not trained"),
        (other_context, "in another context than was served"),
    ],
)
def test_faults_in_what_is_trained_are_caught(tamper, fault):
    report = fuzz(templated("plain"), range(1), calls=6, tamper=tamper)
    assert any(fault in violation for violation in report.violations)
