"""The line of a job that declares none: task -> generator -> reward -> trainer, and weights back. With agents, these take the
place of the generator, which answers their calls; rewards that agents give themselves need no role. A job that samples
nothing has only rows of data and the trainer."""

from __future__ import annotations

from llamarl.config import Config
from llamarl.controller.line import SOURCE, Channel, Line, Role

GROUPS_AHEAD = 4  # groups in the inbox of the reward, so that it need not wait for the next one
GENERATOR_AHEAD = 3  # capacity per slot: no slot should be empty while the longest answer of a group is written


def default_line(config: Config) -> Line:
    """A reward model, a reference policy, a teacher and a critic stand between reward and trainer if the config asks for
    them."""
    if not config.samples:
        return _rows_line(config)
    samples = config.schedule.samples_per_group
    stops, between, to_trainer = _way_to_trainer(config)
    judges = [Role(name="reward", unit="group", done="scored", capacity=GROUPS_AHEAD * samples, threads=1)]
    return Line(
        [
            *_agents(config),
            Role(
                name="generator",
                unit="call" if config.agent else "group",
                done="answered" if config.agent else "generated",
                executors=config.generator.replicas,
                ranks=config.generator.tensor,
                capacity=GENERATOR_AHEAD * config.generator.slots + config.num_parked,
                at_once=config.generator.slots + config.num_parked,
                threads=config.generator.threads,
                gpu=True,
            ),
            *(judges if "reward" in stops else ()),
            _trainer(config),
            *between,
        ],
        [
            Channel("prompts", "groups", SOURCE, stops[0]),
            *to_trainer,
            *([Channel("calls", "calls", "agent", "generator")] if config.agent else ()),
            Channel("weights", "weights", "trainer", "generator"),
        ],
    )


def _trainer(config: Config) -> Role:
    settings = config.trainer
    return Role(name="trainer", unit="batch", done="trained", ranks=settings.ranks, threads=settings.threads, gpu=True)


def _rows_line(config: Config) -> Line:
    """Rows of data, which need neither weights nor a judge."""
    capacity = config.schedule.num_places * config.schedule.samples_per_group
    return Line(
        [Role(name="rows", unit="group", done="read", capacity=capacity, threads=1), _trainer(config)],
        [Channel("prompts", "groups", SOURCE, "rows"), Channel("rollouts", "groups", "rows", "trainer")],
    )


def _agents(config: Config) -> list[Role]:
    """The role that runs agents, if the job has any. It holds one group for each of its processes."""
    if not config.agent:
        return []
    capacity = config.agent.workers * config.schedule.samples_per_group
    done = "generated" if config.agent.reward == "scorer" else "scored"
    return [Role(name="agent", unit="group", done=done, executors=config.agent.replicas, capacity=capacity, threads=1)]


def _way_to_trainer(config: Config) -> tuple[list[str], list[Role], list[Channel]]:
    """The stops of a group, the roles between reward and trainer (a reward model, a reference policy, a teacher and a critic
    with ranks of their own, where there are any), and the channels from stop to stop."""
    roles: list[Role] = []
    if config.reward_model.path:
        ahead = GROUPS_AHEAD * config.schedule.samples_per_group
        threads = config.reward_model.threads
        roles.append(Role(name="reward_model", unit="group", done="ranked", capacity=ahead, threads=threads, gpu=True))
    if config.reference_alone:
        settings = config.reference
        roles.append(
            Role(
                name="reference",
                unit="batch",
                done="referenced",
                ranks=settings.ranks,
                threads=settings.threads,
                gpu=True,
            )
        )
    if config.teacher.alone:
        taught = config.teacher
        roles.append(
            Role(
                name="teacher",
                unit="batch",
                done="taught",
                ranks=taught.ranks,
                threads=taught.threads,
                gpu=not taught.url,
                repeats=taught.sends_states,
            )
        )
    if config.critic_alone:
        valued = config.critic
        roles.append(
            Role(name="critic", unit="batch", done="valued", ranks=valued.ranks, threads=valued.threads, gpu=True)
        )
    first, judged = ("agent", config.agent.reward == "scorer") if config.agent else ("generator", True)
    stops = [first, *(["reward"] if judged else []), *(role.name for role in roles), "trainer"]
    names = [*(["completions"] if judged else []), "rollouts", *(role.done for role in roles)]
    return stops, roles, [Channel(names[at], "groups", stops[at], stops[at + 1]) for at in range(len(stops) - 1)]
