"""Claim 19: on-policy distillation takes a third of RL's updates. Qwen2.5-Coder-1.5B-Instruct on GSM8K: the policy that
claim 1 trained teaches its own start; accuracy on all 1,319 test problems, over updates, beside that of RL.

    python benchmarks/claims/distil_learns.py [--teacher async|lora] [--lr 5e-6] [--runs FOLDER] [KEY=VALUE ...]

The teacher is the last policy of the run of claim 1 (`async`, examples/gsm8k_qwen.yaml as it stands) or of claim 15 (`lora`,
its adapters merged). The student begins where that run began, and learns all its weights from the teacher's whole
distribution, without rewards. Must: 70% after a third of the updates.
"""

from __future__ import annotations

from pathlib import Path

from arms import ASYNC, Arm, Figures, Options, Record, claim_parser, keep, llamarl, made, options_of
from learns import smoothed_reward
from lora_learns import LORA
from plot import lines

MUST, SHARE = 0.70, 3
TEACHERS = {arm.name: arm for arm in (ASYNC, LORA)}


def main() -> None:
    parser = claim_parser(__doc__)
    parser.add_argument("--teacher", choices=TEACHERS, default=ASYNC.name, help="whose policy teaches")
    parser.add_argument("--lr", default="5e-6", help="learning rate of the student")
    args = parser.parse_intermixed_args()
    options, arm = options_of(args), TEACHERS[args.teacher]
    name = f"distil-{arm.name}"
    options.expect(arm.name, name)
    teacher = made(arm, options)
    wanted = teacher.summary["updates"] // SHARE
    student = made(_student(name, _policy(teacher, options), wanted, args.lr), options)
    updates = student.summary["updates"]
    accuracy, taught = student.accuracy, max(teacher.accuracy.items())[1]
    print("updates  minutes  test accuracy  KL to the teacher")
    for version in sorted(accuracy):
        kl = student.metrics[max(0, version - 1)]["teacher_kl"]
        print(f"{version:7}  {student.minutes(version):7.1f}  {accuracy[version]:.1%}  {kl:.4f}")
    reached = accuracy[updates]
    for version, value in sorted(teacher.accuracy.items()):
        print(f"RL {version:4}  {teacher.minutes(version):7.1f}  {value:.1%}")
    print(
        f"{reached:.1%} after {updates} updates (must {MUST:.0%}); the teacher: {taught:.1%} after {len(teacher.updates)}"
    )
    figures = {
        "accuracy": [(student.minutes(version), value) for version, value in sorted(accuracy.items())],
        "over_updates": sorted(accuracy.items()),
        "rl_accuracy": [(teacher.minutes(version), value) for version, value in sorted(teacher.accuracy.items())],
        "rl_over_updates": sorted(teacher.accuracy.items()),
        "teacher": arm.name,
        "teacher_accuracy": taught,
        "teacher_minutes": teacher.minutes(teacher.summary["updates"]),
        "updates": updates,
        "teacher_kl": [row["teacher_kl"] for _, row in sorted(student.metrics.items())],
        "update_s": student.window(8, updates - 1).update_s,
        "teacher_update_s": teacher.window(8, updates - 1).update_s,
        "must": MUST,
        "met": reached >= MUST,
        "reward": smoothed_reward(student),
        "summary": student.summary,
    }
    keep("distil_learns", options, figures, picture)


def _policy(teacher: Record, options: Options) -> Path:
    """The folder of a whole model."""
    policy = (teacher.folder / str(teacher.summary["policy"])).absolute()
    if teacher.folder.name != LORA.name:
        return policy
    whole = teacher.folder.with_name(f"{LORA.name}-merged").absolute()
    if not whole.exists() and llamarl("merge", ["merge", str(teacher.folder), str(whole)], options):
        raise SystemExit(f"{teacher.folder}: its adapters could not be merged")
    return whole


def _student(name: str, teacher: Path, updates: int, lr: str) -> Arm:
    return Arm(
        name,
        (
            f"teacher.path={teacher}",
            "algo.reward_weight=0",
            f"schedule.updates={updates}",
            f"evaluate.every={max(1, updates // 3)}",
            f"trainer.lr={lr}",
            "snapshots.at_end=policy",
        ),
    )


def picture(figures: Figures) -> str:
    series = {
        "distilled from the policy of RL": figures["over_updates"],
        "RL with rewards": figures["rl_over_updates"],
    }
    title = "Qwen2.5-Coder-1.5B on GSM8K, test accuracy"
    return lines(title, "updates", "share right", series, tuple(series))


if __name__ == "__main__":
    main()
