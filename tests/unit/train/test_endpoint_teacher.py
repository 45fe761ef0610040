"""A teacher behind HTTP: exact tokens out, log-probs of the sampled ones back, and every refusal in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.groups import completion, rollout_group
from helpers.stub_teacher import SPOKEN, StubEndpoint, stub_endpoint
from msgspec.structs import replace

from llamarl.algo.streams import TEACHER_LOGPROBS
from llamarl.builders.teacher import check_teachers
from llamarl.config import Config, TeacherConfig
from llamarl.config.teacher import THE_TEACHER
from llamarl.errors import ConfigError
from llamarl.train import endpoint_teacher
from llamarl.train.endpoint_teacher import EndpointFailed, EndpointTeacher
from llamarl.types import Given, RolloutGroup, bytes_to_floats


@pytest.fixture
def endpoint() -> Iterator[StubEndpoint]:
    with stub_endpoint() as server:
        yield server


def settings(server: StubEndpoint, **more: Any) -> TeacherConfig:
    return TeacherConfig(url=server.url, kl="sampled", place="own", **more)


def taught() -> RolloutGroup:
    group = rollout_group([3, 4], [(completion([5, 6]), 1.0), (completion([7]), 0.0)])
    return replace(group, prompt=replace(group.prompt, teacher=THE_TEACHER))


def test_the_column_holds_the_log_probs_of_the_sampled_tokens(endpoint: StubEndpoint) -> None:
    untaught = rollout_group([3], [(completion([5]), 1.0)], ordinal=1)
    found, other = EndpointTeacher(settings(endpoint)).add_column([taught(), untaught])
    columns = [bytes_to_floats(one.columns[TEACHER_LOGPROBS]).tolist() for one in found.rollouts]
    assert columns == [pytest.approx([-5.02, -6.03]), pytest.approx([-7.02])]
    assert other == untaught
    assert {one["path"] for one in endpoint.asked} == {"/inference/v1/generate"}
    assert sorted(one["token_ids"] for one in endpoint.asked) == [[3, 4, 5, 6], [3, 4, 7]]


def test_replies_of_tools_have_no_place_in_it(endpoint: StubEndpoint) -> None:
    group = taught()
    talk = replace(completion([5, 9, 9, 6]), given=(Given(1, 2),), behavior_logprobs=bytes(8))
    group = replace(group, rollouts=(replace(group.rollouts[0], completion=talk),))
    (found,) = EndpointTeacher(settings(endpoint)).add_column([group])
    assert bytes_to_floats(found.rollouts[0].columns[TEACHER_LOGPROBS]).tolist() == pytest.approx([-5.02, -6.05])


def test_a_busy_endpoint_is_asked_again_and_one_that_refuses_is_not(
    endpoint: StubEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_teacher, "_FIRST_PAUSE_S", 0.0)
    endpoint.statuses = [503, 429]
    assert EndpointTeacher(settings(endpoint)).scored([3, 4])[0]["logprob"] == -4.01
    endpoint.statuses = [403]
    with pytest.raises(EndpointFailed, match="answers 403"):
        EndpointTeacher(settings(endpoint)).scored([3, 4])
    assert len(endpoint.asked) == 4


def test_a_key_comes_from_the_environment_and_goes_to_this_machine_or_over_https(
    endpoint: StubEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="TEACHER_KEY holds no key"):
        EndpointTeacher(settings(endpoint, key_env="TEACHER_KEY"))
    monkeypatch.setenv("TEACHER_KEY", "secret")
    EndpointTeacher(settings(endpoint, key_env="TEACHER_KEY")).scored([3, 4])
    assert endpoint.asked[0]["key"] == "Bearer secret"
    away = TeacherConfig(url="http://example.com", kl="sampled", place="own", key_env="TEACHER_KEY")
    with pytest.raises(ConfigError, match="a key is sent over https"):
        EndpointTeacher(away)


def test_another_tokenizer_and_an_endpoint_without_log_probs_are_refused(
    endpoint: StubEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_teacher, "_RETRIES", 0)
    config = Config(teacher=settings(endpoint))
    check_teachers(config, SPOKEN)
    endpoint.text = lambda token: f"<{token}>"
    with pytest.raises(
        ConfigError, match=r"teacher\.url: its tokenizer is another than the policy's: token 1 is '<1>'"
    ):
        check_teachers(config, SPOKEN)
    endpoint.silent = True
    with pytest.raises(ConfigError, match="gives no prompt_logprobs"):
        check_teachers(config, SPOKEN)
    gone = Config(teacher=TeacherConfig(url="http://127.0.0.1:9", kl="sampled", place="own"))
    with pytest.raises(ConfigError, match=r"teacher\.url: .* cannot be asked"):
        check_teachers(gone, SPOKEN)
