"""Acting in environments: one step of all of them, their episodes, evaluation, and the contract they keep."""

from rein.rollout.evaluate import Evaluation, evaluate
from rein.rollout.random_policy import RandomPolicy
from rein.rollout.recorder import Recorder
from rein.rollout.statistics import EpisodeStatistics
from rein.rollout.step import PHASES, batch_step, persist_trajectory, silent

__all__ = [
    "PHASES",
    "EpisodeStatistics",
    "Evaluation",
    "RandomPolicy",
    "Recorder",
    "batch_step",
    "evaluate",
    "persist_trajectory",
    "silent",
]
