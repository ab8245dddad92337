# Public names of rein, imported when first used.

from rein import agents as agents
from rein import envs as envs
from rein import episodes as episodes
from rein import errors as errors
from rein import handlers as handlers
from rein import integrations as integrations
from rein import loop as loop
from rein import networks as networks
from rein import ops as ops
from rein import protocols as protocols
from rein import recipes as recipes
from rein import replay as replay
from rein import schedules as schedules
from rein import store as store
from rein import testing as testing
from rein import training as training
from rein import types as types
from rein.agents import *
from rein.envs.base.self_play import SelfPlay as SelfPlay
from rein.envs.jax import JaxEnvironment as JaxEnvironment
from rein.envs.make import make as make
from rein.envs.pettingzoo import PettingZooEnvironment as PettingZooEnvironment
from rein.envs.tensors import TensorEnvironment as TensorEnvironment
from rein.episodes import Evaluation as Evaluation
from rein.episodes import batch_step as batch_step
from rein.episodes import evaluate as evaluate
from rein.episodes.tournament import tournament as tournament
from rein.errors import CheckpointError as CheckpointError
from rein.errors import EnvironmentContractError as EnvironmentContractError
from rein.errors import NonFiniteError as NonFiniteError
from rein.errors import ReinError as ReinError
from rein.errors import StoreError as StoreError
from rein.errors import WorkerDied as WorkerDied
from rein.errors import WorkerError as WorkerError
from rein.errors import WorkerTimeout as WorkerTimeout
from rein.handlers import *
from rein.integrations.export import export as export
from rein.integrations.learning_curves import plot as plot
from rein.loop import Loop as Loop
from rein.loop.state import State as State
from rein.schedules import Schedule as Schedule
from rein.schedules import linear as linear
from rein.store.checkpoint_folder import Checkpoints as Checkpoints
from rein.store.hdf5 import HDF5Store as HDF5Store
from rein.store.loading import load as load
from rein.store.loading import resume as resume
from rein.store.loading import save as save
from rein.store.memory import MemoryStore as MemoryStore
from rein.store.reader import open_run as open_run
from rein.training.collection.collector import Asynchronous as Asynchronous
from rein.training.collection.collector import FirstCome as FirstCome
from rein.training.collection.ray_actors import RayActors as RayActors
from rein.training.offline import fill as fill
from rein.training.offline import offline_loop as offline_loop
from rein.training.opponent_pool import OpponentPool as OpponentPool
from rein.training.saved_agents import load_agent as load_agent
from rein.training.saved_agents import load_policy as load_policy
from rein.training.training_loop import train as train
from rein.training.training_loop import training_loop as training_loop
from rein.types import Episodes as Episodes
from rein.types import StepState as StepState
from rein.types import TimeStep as TimeStep
from rein.types import Trajectory as Trajectory
from rein.types import Transition as Transition

__version__: str
