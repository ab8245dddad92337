from rein.networks.custom import actor as actor
from rein.networks.custom import critic as critic
from rein.networks.custom import q_network as q_network
from rein.networks.factories import policy_outputs as policy_outputs
from rein.networks.mlp import MLP as MLP
from rein.networks.recurrent import GRU as GRU
from rein.networks.recurrent import LSTM as LSTM
from rein.networks.recurrent import MinimalGRU as MinimalGRU
