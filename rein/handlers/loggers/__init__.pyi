from rein.handlers.loggers.attach import attach as attach
from rein.handlers.loggers.csv import CSVLogger as CSVLogger
from rein.handlers.loggers.mlflow import MlflowLogger as MlflowLogger
from rein.handlers.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from rein.handlers.loggers.wandb import WandbLogger as WandbLogger
