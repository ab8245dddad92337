"""Acting in environments: steps, episodes, evaluation, and checks that the parts fit together."""

from rein.episodes.episode_statistics import EpisodeStatistics
from rein.episodes.evaluation import Evaluation, EvaluationEvent, evaluate
from rein.episodes.random_policy import RandomPolicy
from rein.episodes.recorder import Recorder
from rein.episodes.step import PHASES, batch_step, persist_trajectory, silent

__all__ = [
    "PHASES",
    "EpisodeStatistics",
    "Evaluation",
    "EvaluationEvent",
    "RandomPolicy",
    "Recorder",
    "batch_step",
    "evaluate",
    "persist_trajectory",
    "silent",
]
