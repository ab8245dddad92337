from rein.networks.custom_networks import policy_outputs as policy_outputs
from rein.networks.mlp import MLP as MLP
from rein.networks.observation_networks import actor as actor
from rein.networks.observation_networks import critic as critic
from rein.networks.observation_networks import q_network as q_network
from rein.networks.recurrent import GRU as GRU
from rein.networks.recurrent import LSTM as LSTM
from rein.networks.recurrent import MinimalGRU as MinimalGRU
