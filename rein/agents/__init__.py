"""Agents: one module per algorithm, and the base classes of custom agents. Names are imported when first used."""

from typing import TYPE_CHECKING

from rein.lazy import exports

if TYPE_CHECKING:
    from rein.agents.a2c import A2C
    from rein.agents.awac import AWAC
    from rein.agents.base.agent import Agent
    from rein.agents.base.deterministic import DeterministicAgent
    from rein.agents.base.exploration import GaussianNoise, OrnsteinUhlenbeck, Plateau
    from rein.agents.base.network_agent import NetworkAgent
    from rein.agents.base.on_policy import OnPolicyAgent
    from rein.agents.base.options import option
    from rein.agents.base.replay_agent import ReplayAgent
    from rein.agents.base.segments import Segments
    from rein.agents.base.value_agent import ValueAgent
    from rein.agents.bc import BC
    from rein.agents.ddpg import DDPG
    from rein.agents.discrete_sac import DiscreteSAC
    from rein.agents.dqn import DQN
    from rein.agents.impala import IMPALA
    from rein.agents.iql import IQL
    from rein.agents.iqn import IQN
    from rein.agents.ppo import PPO
    from rein.agents.pqn import PQN
    from rein.agents.q_learning import QLearning
    from rein.agents.recurrent_dqn import RecurrentDQN
    from rein.agents.sac import SAC
    from rein.agents.td3 import TD3

__all__ = [
    "A2C",
    "AWAC",
    "BC",
    "DDPG",
    "DQN",
    "IMPALA",
    "IQL",
    "IQN",
    "PPO",
    "PQN",
    "SAC",
    "TD3",
    "Agent",
    "DeterministicAgent",
    "DiscreteSAC",
    "GaussianNoise",
    "NetworkAgent",
    "OnPolicyAgent",
    "OrnsteinUhlenbeck",
    "Plateau",
    "QLearning",
    "RecurrentDQN",
    "ReplayAgent",
    "Segments",
    "ValueAgent",
    "option",
]

MODULES = {
    "A2C": "rein.agents.a2c",
    "AWAC": "rein.agents.awac",
    "BC": "rein.agents.bc",
    "DDPG": "rein.agents.ddpg",
    "DQN": "rein.agents.dqn",
    "IMPALA": "rein.agents.impala",
    "IQL": "rein.agents.iql",
    "IQN": "rein.agents.iqn",
    "PPO": "rein.agents.ppo",
    "PQN": "rein.agents.pqn",
    "SAC": "rein.agents.sac",
    "TD3": "rein.agents.td3",
    "Agent": "rein.agents.base.agent",
    "DeterministicAgent": "rein.agents.base.deterministic",
    "DiscreteSAC": "rein.agents.discrete_sac",
    "GaussianNoise": "rein.agents.base.exploration",
    "NetworkAgent": "rein.agents.base.network_agent",
    "OnPolicyAgent": "rein.agents.base.on_policy",
    "OrnsteinUhlenbeck": "rein.agents.base.exploration",
    "Plateau": "rein.agents.base.exploration",
    "QLearning": "rein.agents.q_learning",
    "RecurrentDQN": "rein.agents.recurrent_dqn",
    "ReplayAgent": "rein.agents.base.replay_agent",
    "Segments": "rein.agents.base.segments",
    "ValueAgent": "rein.agents.base.value_agent",
    "option": "rein.agents.base.options",
}
__getattr__ = exports(__name__, MODULES)
