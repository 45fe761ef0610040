"""Every setting of a job, with its default, limits and meaning: said once, here. Read, never written.

`llamarl config` prints this file as a table. What follows from other values is a property, not a setting.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from llamarl.errors import ConfigError
from llamarl.types import Sampling


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of the YAML file."""


Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")]
Threads = Annotated[int, Meta(ge=0, description="CPU threads of each process; 0: one for each core")]


class Model(Section, frozen=True):
    path: Annotated[
        str, Meta(description="folder with config.json, *.safetensors and tokenizer.json; 'tiny' is the shipped model")
    ] = "tiny"


class Source(Section, frozen=True):
    """Where problems come from, and how a problem becomes a prompt."""

    kind: Annotated[
        Literal["arithmetic", "gsm8k", "math", "svamp", "jsonl", "code", "mixture"],
        Meta(description="where prompts come from"),
    ] = "arithmetic"
    path: Annotated[str, Meta(description="data file, or folder with train.jsonl; nothing is ever downloaded")] = ""
    test_path: Annotated[
        str, Meta(description="file of the fixed test problems; empty: test.jsonl beside the training file, if any")
    ] = ""
    max_operand: Annotated[int, Meta(ge=9, le=999, description="arithmetic: operands run from 0 to this")] = 99
    held_out: Annotated[
        float, Meta(gt=0, lt=1, description="share of the problems kept for evaluation, chosen by hash")
    ] = 0.1
    prompt_field: Annotated[
        str, Meta(min_length=1, description="jsonl: field with the prompt, a text or a list of {role, content}")
    ] = "prompt"
    answer_field: Annotated[str, Meta(min_length=1, description="jsonl: field with the answer")] = "answer"
    solution_field: Annotated[
        str, Meta(description="jsonl: field with a worked solution, shown in few-shot examples; empty: the answer")
    ] = ""
    template: Annotated[
        str, Meta(description="the prompt, with {prompt} where the problem goes; empty: what suits the kind")
    ] = ""
    few_shot: Annotated[int, Meta(ge=0, le=64, description="solved examples before each problem")] = 0


class Part(Source, frozen=True):
    """One component of a mixture."""

    weight: Annotated[float, Meta(gt=0, description="share of the prompts, relative to the other parts'")] = 1.0

    def __post_init__(self) -> None:
        if self.kind == "mixture":
            raise ConfigError("task.parts: a part of a mixture cannot be a mixture")


class Task(Source, frozen=True):
    chat: Annotated[bool, Meta(description="prompts are user messages in the model's chat template")] = False
    system: Annotated[str, Meta(description="chat: the system message; empty: none")] = ""
    parts: Annotated[
        tuple[Part, ...], Meta(description="mixture: its components, each with kind, weight, path and so on")
    ] = ()

    def __post_init__(self) -> None:
        if (self.kind == "mixture") != bool(self.parts):
            raise ConfigError("task.parts: a mixture needs parts, and nothing else has any")
        if self.parts and (self.path or self.test_path or self.template or self.few_shot):
            raise ConfigError("task.path: a mixture's parts have paths, templates and examples of their own")
        if self.system and not self.chat:
            raise ConfigError("task.system: cannot take effect without task.chat=true")


class Reward(Section, frozen=True):
    scorer: Annotated[
        str,
        Meta(
            description="auto (what suits the task), exact, numeric, choice, regex, math, format, length, code, llm_judge, "
            "none (0 for everything), or FILE.py:FUNCTION called as score(completion, answer, prompt), which may be async"
        ),
    ] = "auto"
    combine: Annotated[
        dict[str, float], Meta(description="several scorers and their weights, summed, instead of one: {math: 1, ...}")
    ] = {}
    answer_from: Annotated[
        Literal["auto", "whole", "boxed", "hashes", "last_number"],
        Meta(
            description="numeric, math: the final answer is the whole text, in \\boxed{}, after ####, the last number"
        ),
    ] = "auto"
    pattern: Annotated[
        str, Meta(description="regex: must be found; where it has a group, its last match must be the answer")
    ] = ""
    format: Annotated[
        Literal["boxed", "hashes", "think"],
        Meta(description="format: one \\boxed{}, a last line with ####, or <think>...</think> before the answer"),
    ] = "boxed"
    max_chars: Annotated[
        int, Meta(ge=2, description="length: 1 for up to half as many characters, falling to 0 at this many")
    ] = 4000
    tests: Annotated[
        Literal["all", "share"], Meta(description="code: 1 for passing all tests, or the share of tests passed")
    ] = "all"
    workers: Annotated[
        int, Meta(ge=1, le=256, description="processes for scorers that can hang or are foreign (math, code, FILE.py)")
    ] = 2
    timeout_s: Annotated[float, Meta(gt=0, description="a worker that takes longer over one answer is killed")] = 2.0
    memory_mb: Annotated[
        int, Meta(ge=128, description="memory for judging one answer; FILE.py: beyond what the file itself loads")
    ] = 512
    retries: Annotated[
        int, Meta(ge=0, le=10, description="an answer that could not be judged is tried so often again")
    ] = 1
    max_failure_share: Annotated[
        float,
        Meta(ge=0, le=1, description="of the last 1,000 answers; beyond it the job stops, since its scorer is broken"),
    ] = 0.1

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) for weight in self.combine.values()):
            raise ConfigError("reward.combine: weights must be finite numbers")
        if self.combine and self.scorer != "auto":
            raise ConfigError("reward.scorer: cannot take effect beside reward.combine; put it in there with a weight")
        if not math.isfinite(self.timeout_s):
            raise ConfigError("reward.timeout_s: must be a finite number")


class Sandbox(Section, frozen=True):
    """Limits of one run of a program that the policy wrote; see docs/sandbox.md."""

    cpu_s: Annotated[
        float, Meta(gt=0, le=3600, description="processor time of each of its processes, in whole seconds")
    ] = 4.0
    wall_s: Annotated[float, Meta(gt=0, le=3600, description="a run that takes longer is ended")] = 8.0
    answer_s: Annotated[
        float, Meta(gt=0, le=36_000, description="for all tests of one answer; those it does not reach are failed")
    ] = 30.0
    memory_mb: Annotated[int, Meta(ge=48, description="address space of each of its processes")] = 256
    processes: Annotated[int, Meta(ge=1, le=1000, description="processes and threads it may have at once")] = 16
    file_mb: Annotated[int, Meta(ge=0, description="of all files together that it writes; they are gone with it")] = 16
    output_kb: Annotated[int, Meta(ge=1, le=1 << 16, description="output beyond this ends the run")] = 64
    python: Annotated[
        str, Meta(description="interpreter, with its installed packages; empty: this one, standard library alone")
    ] = ""

    @property
    def patience_s(self) -> float:
        """For one run, with putting up its walls and taking them down."""
        return self.wall_s + 3.0


class Conversation(Section, frozen=True):
    """Several turns: what the model says goes to a tool, whose reply comes before its next; see docs/conversations.md."""

    tool: Annotated[
        str,
        Meta(
            description="calculator, python (in the sandbox), command, or FILE.py:FUNCTION called as tool(said, turns); "
            "empty: one turn, no tool"
        ),
    ] = ""
    command: Annotated[
        tuple[str, ...], Meta(description="command: its words; gets JSON on its input, replies on its output")
    ] = ()
    max_turns: Annotated[int, Meta(ge=2, le=1000, description="of the model; after the last no tool is asked")] = 4
    begin: Annotated[
        str, Meta(description="calculator, python: a call stands behind this mark; empty: see docs/conversations.md")
    ] = ""
    end: Annotated[str, Meta(description="calculator, python: and before this one; empty: it runs to the end")] = ""
    reply: Annotated[str, Meta(description="how a reply is put, with {reply} in it, where the prompt is no chat")] = (
        "{reply}"
    )
    role: Annotated[Literal["user", "tool"], Meta(description="chat: whose message a reply is")] = "user"
    max_reply_chars: Annotated[int, Meta(ge=1, description="a longer reply is cut, and says so")] = 2000
    judge: Annotated[
        Literal["last", "all"],
        Meta(description="what is judged: the last turn, or all that was said, replies included"),
    ] = "last"
    workers: Annotated[int, Meta(ge=1, le=256, description="processes that run tools, for each generator")] = 2
    timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="a tool that takes longer is killed; python: besides sandbox.wall_s")
    ] = 5.0
    memory_mb: Annotated[int, Meta(ge=128, description="memory of one call, beyond what the tool itself loads")] = 512
    retries: Annotated[int, Meta(ge=0, le=10, description="a call that failed is tried so often again")] = 1
    max_failure_share: Annotated[
        float,
        Meta(ge=0, le=1, description="of the last 1,000 calls; beyond it the job stops, since its tool is broken"),
    ] = 0.1

    def __post_init__(self) -> None:
        if self.tool and ":" not in self.tool and self.tool not in ("calculator", "python", "command"):
            raise ConfigError(
                f"conversation.tool: unknown tool '{self.tool}'; known: calculator, python, command, or FILE.py:FUNCTION"
            )
        if (self.tool == "command") != bool(self.command):
            raise ConfigError("conversation.command: tool=command needs one, and nothing else has any")
        if "{reply}" not in self.reply:
            raise ConfigError("conversation.reply: must hold {reply} where the tool's words go")
        if self.end and not self.begin:
            raise ConfigError("conversation.end: cannot take effect without conversation.begin")


class Generator(Section, frozen=True):
    replicas: Annotated[int, Meta(ge=1, description="copies of the policy that generate side by side")] = 1
    tensor: Annotated[
        int, Meta(ge=1, description="ranks of one replica, which share every product (tensor parallel)")
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="of weights and KV cache; auto: bfloat16 on a GPU, float32 elsewhere; float16: see trainer.dtype"
        ),
    ] = "auto"
    quantise: Annotated[
        Literal["none", "fp8", "int8"],
        Meta(
            description="narrow copies of the blocks' matrices, made of each new version; fp8 also narrows their inputs"
        ),
    ] = "none"
    kv_cache: Annotated[
        Literal["auto", "fp8"], Meta(description="precision of keys and values; auto: that of dtype")
    ] = "auto"
    slots: Annotated[int, Meta(ge=1, description="completions decoded at once by one replica")] = 768
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="a longer prompt is dropped, with the reason")] = 32
    max_new_tokens: Annotated[int, Meta(ge=1, description="longest completion, in tokens")] = 8
    temperature: Annotated[
        float, Meta(ge=0.01, le=10, description="of the sampling; also divides the trainer's logits")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="sample from the k likeliest tokens only; 0: from all")] = 0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="sample from the fewest likeliest tokens that make up this probability")
    ] = 1.0
    min_p: Annotated[
        float, Meta(ge=0, lt=1, description="leave out tokens less likely than this share of the likeliest")
    ] = 0.0
    page_tokens: Annotated[int, Meta(ge=1, description="tokens in one page of the KV cache")] = 16
    kv_pages: Annotated[
        int, Meta(ge=0, description="pages of the KV cache; 0: enough for all slots, as far as a GPU's memory goes")
    ] = 0
    kv_on_new_weights: Annotated[
        Literal["keep", "recompute"],
        Meta(description="keys and values of answers under way when weights change: keep them, or compute them anew"),
    ] = "keep"
    burst: Annotated[
        int, Meta(ge=0, description="decode steps between two looks at the results; 0: 1 on a CPU, 8 on a GPU")
    ] = 0
    device: Device = "auto"
    threads: Threads = 0


class Trainer(Section, frozen=True):
    lr: Annotated[float, Meta(gt=0, le=1, description="AdamW's learning rate")] = 8e-5
    warmup_updates: Annotated[int, Meta(ge=0, description="updates over which lr rises linearly from 0")] = 10
    final_lr_share: Annotated[
        float, Meta(ge=0, le=1, description="after the warm-up lr falls linearly to this share of itself")
    ] = 0.1
    betas: Annotated[tuple[float, float], Meta(description="AdamW's averaging factors, each in [0, 1)")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's, on matrices only")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="gradients are scaled down to this norm")] = 1.0
    data: Annotated[int, Meta(ge=1, description="ranks that share an update's tokens and the weights (FSDP)")] = 1
    tensor: Annotated[
        int, Meta(ge=1, description="ranks that share every product (tensor parallel); data * tensor processes in all")
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="of the passes; master weights and moments are float32; auto: bfloat16 on a GPU; float16: forward "
            "products take float16, all else is as with bfloat16, and a float16 generator's log-probs are nearer"
        ),
    ] = "auto"
    tokens_per_pack: Annotated[
        int, Meta(ge=16, description="most tokens of one forward and backward pass; a longer sequence goes alone")
    ] = 16_384
    recompute: Annotated[
        Literal["none", "selective", "full"],
        Meta(description="activations made again in the backward pass: none, those of the MLPs, or of whole blocks"),
    ] = "none"
    compile: Annotated[
        Literal["auto", "on", "off"], Meta(description="compile the blocks with torch.compile; auto: on a GPU")
    ] = "auto"
    offload: Annotated[
        bool, Meta(description="keep the optimizer's state in host memory between updates (for large models)")
    ] = False
    device: Device = "auto"
    threads: Threads = 0

    @property
    def ranks(self) -> int:
        return self.data * self.tensor


class Algo(Section, frozen=True):
    loss: Annotated[
        str,
        Meta(
            description="aipo, reinforce, rloo, ppo, grpo, cispo, gspo, or FILE.py:FUNCTION called as loss(tokens, algo)"
        ),
    ] = "aipo"
    advantage: Annotated[
        Literal["auto", "mean", "leave_one_out", "mean_std"],
        Meta(description="what a reward is held against: its group's mean ...; auto: what the loss was published with"),
    ] = "auto"
    rho: Annotated[float, Meta(gt=0, description="AIPO's upper clip of the importance weight; 2 to 10 works well")] = (
        4.0
    )
    clip_low: Annotated[float, Meta(ge=0, le=1, description="ppo, grpo: a ratio below 1 - this stops pulling")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="ppo, grpo: a ratio above 1 + this stops pulling")] = 0.2
    cispo_high: Annotated[float, Meta(ge=0, description="cispo: the importance weight is cut at 1 + this")] = 4.0
    gspo_low: Annotated[float, Meta(ge=0, le=1, description="gspo: clip of a whole answer's ratio, downwards")] = 3e-4
    gspo_high: Annotated[float, Meta(ge=0, description="gspo: clip of a whole answer's ratio, upwards")] = 4e-4
    reference_kl: Annotated[
        float, Meta(ge=0, description="weight of the KL to the reference policy; above 0 puts a reference on the line")
    ] = 0.0
    entropy: Annotated[float, Meta(ge=0, description="weight of an entropy bonus")] = 0.0
    overlong: Annotated[
        Literal["keep", "mask", "penalise"],
        Meta(description="answers cut off at the token limit: keep, take out of the loss, or take from their reward"),
    ] = "keep"
    overlong_penalty: Annotated[
        float, Meta(ge=0, description="what overlong=penalise takes from the reward of an answer that was cut off")
    ] = 1.0
    zero_variance: Annotated[
        Literal["keep", "skip"],
        Meta(description="groups whose rewards are all equal: keep their tokens in the loss's denominator, or skip"),
    ] = "skip"


class Reference(Section, frozen=True):
    """The policy that `algo.reference_kl` holds the trained one against."""

    model: Annotated[str, Meta(description="its model folder; empty: the one training starts from")] = ""
    place: Annotated[
        Literal["own", "trainer"],
        Meta(description="on ranks of its own, or on the trainer's, its weights in host memory between uses"),
    ] = "own"
    data: Annotated[int, Meta(ge=1, description="place=own: ranks that share an update's tokens and the weights")] = 1
    tensor: Annotated[int, Meta(ge=1, description="place=own: ranks that share every product")] = 1
    device: Device = "auto"
    threads: Threads = 0

    @property
    def ranks(self) -> int:
        return self.data * self.tensor


class RewardModel(Section, frozen=True):
    """A model on the line behind the scorer, whose score is added to the reward."""

    path: Annotated[
        str, Meta(description="its Hugging Face sequence-classification folder (one label); empty: no such role")
    ] = ""
    weight: Annotated[
        float, Meta(description="of its score in the reward; set reward.scorer=none to have it alone")
    ] = 1.0
    squash: Annotated[bool, Meta(description="its score through a sigmoid, so that it lies between 0 and 1")] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="auto: bfloat16 on a GPU, float32 elsewhere")
    ] = "auto"
    device: Device = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError("reward_model.weight: must be a finite number")


class LLMJudge(Section, frozen=True):
    """The endpoint behind `reward.scorer: llm_judge`: anything that speaks OpenAI's chat completions."""

    url: Annotated[
        str, Meta(pattern=r"^https?://[^@?#\s]+$", description="where it is, up to and with /v1; no key in it")
    ] = "http://127.0.0.1:8000/v1"
    model: Annotated[str, Meta(description="the name of the model there")] = ""
    rubric: Annotated[str, Meta(description="file with the rubric, in plain words")] = ""
    key_env: Annotated[
        str, Meta(pattern=r"^\w*$", description="environment variable that holds the key; empty: none is sent")
    ] = ""
    top: Annotated[float, Meta(gt=0, le=1e6, description="the best score; rewards are its shares")] = 10.0
    timeout_s: Annotated[float, Meta(gt=0, le=3600, description="for one request")] = 60.0
    retries: Annotated[int, Meta(ge=0, le=10, description="of a request that met a busy or absent endpoint")] = 3
    max_tokens: Annotated[int, Meta(ge=1, description="that the judge may write")] = 1024
    max_chars: Annotated[int, Meta(ge=1, description="of an answer that the judge is shown")] = 50_000

    @property
    def patience_s(self) -> float:
        """For one answer, pauses between attempts included."""
        return (self.retries + 1) * self.timeout_s + 8.0 * self.retries


class Schedule(Section, frozen=True):
    updates: Annotated[int, Meta(ge=1, description="optimizer steps; each makes the next version of the policy")] = 180
    groups_per_update: Annotated[int, Meta(ge=1, description="P: prompts per update")] = 96
    samples_per_group: Annotated[int, Meta(ge=2, description="n: completions per prompt")] = 8
    max_staleness: Annotated[
        int,
        Meta(ge=0, description="S: versions a trained group may lag behind (window=1); 0 is synchronous and on-policy"),
    ] = 1
    window: Annotated[
        int, Meta(ge=1, description="W: at most W-1 younger groups may be trained before the oldest; 1 keeps order")
    ] = 1
    deterministic: Annotated[
        bool,
        Meta(
            description="asynchronous, yet the same seed gives the same bytes: batch u is sampled by version u - S alone"
        ),
    ] = False
    max_restarts: Annotated[
        int, Meta(ge=0, description="restarts of one executor in a row, without any work done, before the job stops")
    ] = 3
    max_attempts: Annotated[
        int, Meta(ge=1, description="a group whose executor died this often while holding it is dropped")
    ] = 3
    probe_every: Annotated[
        int,
        Meta(
            ge=0,
            description="updates between probes, which compare the generator's log-probs with the trainer's; 0: none",
        ),
    ] = 50
    max_skipped: Annotated[
        int, Meta(ge=1, description="updates in a row whose loss or gradient is no number, before the job stops")
    ] = 5

    @property
    def num_groups(self) -> int:
        return self.updates * self.groups_per_update

    @property
    def num_places(self) -> int:
        """Groups that may be admitted and not yet retired."""
        return (self.max_staleness + 1) * self.groups_per_update

    def sampling_version(self, ordinal: int) -> int:
        """Deterministic mode: the one version that samples this group."""
        return max(0, ordinal // self.groups_per_update - self.max_staleness)

    @property
    def staleness_bound(self) -> int:
        """No token is ever trained on by a version further from the one that sampled its group's first token."""
        return (self.num_places + self.window - 2) // self.groups_per_update


class Snapshots(Section, frozen=True):
    every: Annotated[int, Meta(ge=0, description="updates between snapshots; 0: only one at the end")] = 25
    keep: Annotated[int, Meta(ge=1, description="newest snapshots that are kept")] = 2
    at_end: Annotated[
        Literal["whole", "policy", "none"],
        Meta(
            description="when all updates are made: a whole snapshot; the policy alone, in the model folder's precision, for "
            "runs that nobody will resume; or none"
        ),
    ] = "whole"


class Evaluate(Section, frozen=True):
    prompts: Annotated[int, Meta(ge=0, description="held-out problems answered greedily; 0 switches it off")] = 512
    every: Annotated[int, Meta(ge=0, description="also evaluate every so many updates; 0: only before and after")] = 0
    split: Annotated[
        Literal["held_out", "test"],
        Meta(description="problems that were held out by hash, or the fixed test problems of the task"),
    ] = "held_out"


Address = Annotated[str, Meta(pattern=r"^.+:\d+$")]


class Host(Section, frozen=True):
    """One host of a cluster, on which `llamarl worker` listens."""

    address: Address
    ranks: Annotated[int, Meta(ge=0)] = 0
    roles: tuple[str, ...] = ()


class Engine(Section, frozen=True):
    kind: Annotated[
        Literal["local", "inline", "monarch"],
        Meta(
            description="where executors live: each in a process of its own, or all in this one, in turn, or on several "
            "machines"
        ),
    ] = "local"
    hosts: Annotated[
        tuple[Address | Host, ...],
        Meta(
            description="monarch: HOST:PORT of each worker, or {address, ranks, roles} with how many ranks there is room "
            "for and which roles may live there; empty: all on this machine"
        ),
    ] = ()
    certs: Annotated[
        str, Meta(description="monarch: this machine's folder of certificates, made by `llamarl certs`")
    ] = ""
    host_s: Annotated[float, Meta(gt=0, description="monarch: a host that is silent for so long is taken for lost")] = (
        10.0
    )
    start_s: Annotated[float, Meta(gt=0, description="an executor must be up within this time")] = 300.0
    silence_s: Annotated[
        float, Meta(gt=0, description="an executor with work to do that says nothing for so long is killed")
    ] = 600.0
    frame_s: Annotated[float, Meta(gt=0, description="local: a message must arrive whole within this time")] = 30.0
    trusted_network: Annotated[
        str,
        Meta(
            pattern=r"^[\w.:-]*$",
            description="interface over which weights may cross hosts, in the clear (gloo, NCCL); empty: they may not",
        ),
    ] = ""

    @property
    def all_hosts(self) -> tuple[Host, ...]:
        return tuple(Host(address=host) if isinstance(host, str) else host for host in self.hosts)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Machines, each once: several workers may listen on one."""
        return tuple(dict.fromkeys(host.address.rpartition(":")[0] for host in self.all_hosts))


class Weights(Section, frozen=True):
    lease_s: Annotated[
        float, Meta(gt=0, description="a reader that holds a weight slot longer than this is declared dead")
    ] = 30.0
    transport: Annotated[
        Literal["auto", "memfd", "cuda"],
        Meta(
            description="slots in host memory (memfd) or device memory (cuda: fast, takes twice a rank's weights); auto: "
            "device memory if all sit on GPUs that reach each other"
        ),
    ] = "auto"


class Observe(Section, frozen=True):
    tensorboard: Annotated[bool, Meta(description="also write metrics for TensorBoard into the run folder")] = False


class Config(Section, frozen=True):
    seed: Annotated[int, Meta(ge=0, le=2**62, description="of prompts, sampling and everything else")] = 0
    placement: Annotated[
        Literal["split", "colocated"],
        Meta(description="executors run side by side, or share all devices and take turns (needs max_staleness=0)"),
    ] = "split"
    model: Model = Model()
    task: Task = Task()
    reward: Reward = Reward()
    sandbox: Sandbox = Sandbox()
    llm_judge: LLMJudge = LLMJudge()
    reward_model: RewardModel = RewardModel()
    conversation: Conversation = Conversation()
    generator: Generator = Generator()
    trainer: Trainer = Trainer()
    algo: Algo = Algo()
    reference: Reference = Reference()
    schedule: Schedule = Schedule()
    snapshots: Snapshots = Snapshots()
    evaluate: Evaluate = Evaluate()
    engine: Engine = Engine()
    weights: Weights = Weights()
    observe: Observe = Observe()

    def __post_init__(self) -> None:
        schedule, generator = self.schedule, self.generator
        if generator.slots < schedule.samples_per_group:
            raise ConfigError(
                f"generator.slots: {generator.slots} slots cannot hold one group of "
                f"schedule.samples_per_group={schedule.samples_per_group}"
            )
        if schedule.window > schedule.num_places:
            raise ConfigError(
                f"schedule.window: {schedule.window} cannot take effect, since at most (max_staleness + 1) * "
                f"groups_per_update = {schedule.num_places} groups are under way"
            )
        if schedule.deterministic and schedule.window > 1:
            raise ConfigError(
                f"schedule.window: {schedule.window} lets timing choose the batches, which schedule.deterministic rules out; "
                "set it to 1"
            )
        if schedule.deterministic and self.conversation.tool and generator.kv_pages:
            raise ConfigError(
                f"generator.kv_pages: with {generator.kv_pages} pages, timing decides which conversations are read again, "
                "which schedule.deterministic rules out; set it to 0"
            )
        if not all(0 <= beta < 1 for beta in self.trainer.betas):
            raise ConfigError(f"trainer.betas: each must lie in [0, 1), got {list(self.trainer.betas)}")
        if self.placement == "colocated" and schedule.max_staleness:
            raise ConfigError(
                f"placement: colocated executors take turns, so schedule.max_staleness={schedule.max_staleness} "
                "cannot take effect; set it to 0"
            )
        if self.placement == "colocated" and self.generator.device != self.trainer.device:
            raise ConfigError(
                f"placement: colocated executors share their devices, but generator.device={self.generator.device} "
                f"and trainer.device={self.trainer.device}"
            )
        if self.engine.kind == "inline" and (
            self.generator.tensor > 1 or self.trainer.ranks > 1 or (self.reference_alone and self.reference.ranks > 1)
        ):
            raise ConfigError(
                "engine: inline runs everything in one process; generator.tensor, trainer.data and so on need local"
            )
        if self.trainer.dtype == "float16" and self.trainer.tensor > 1:
            raise ConfigError("trainer.dtype: float16 products are not shared over ranks; set trainer.tensor to 1")
        if self.evaluate.every and not self.evaluate.prompts:
            raise ConfigError("evaluate.every: cannot take effect with evaluate.prompts=0")

    @property
    def training_sampling(self) -> Sampling:
        return Sampling(
            samples=self.schedule.samples_per_group,
            max_new_tokens=self.generator.max_new_tokens,
            temperature=self.generator.temperature,
            top_k=self.generator.top_k,
            top_p=self.generator.top_p,
            min_p=self.generator.min_p,
        )

    @property
    def greedy_sampling(self) -> Sampling:
        return Sampling(samples=1, max_new_tokens=self.generator.max_new_tokens, temperature=0.0)

    @property
    def num_parked(self) -> int:
        """Conversations that may wait for a reply in each generator while others use the slots."""
        return self.generator.slots if self.conversation.tool else 0

    @property
    def model_folder(self) -> Path:
        return _model_folder(self.model.path)

    @property
    def reference_folder(self) -> Path:
        return _model_folder(self.reference.model or self.model.path)

    @property
    def reference_alone(self) -> bool:
        """Whether the reference policy is an executor of its own."""
        return self.algo.reference_kl > 0 and self.reference.place == "own"


def _model_folder(path: str) -> Path:
    return Path(__file__).parent / "assets" / "tiny" if path == "tiny" else Path(path).expanduser()
