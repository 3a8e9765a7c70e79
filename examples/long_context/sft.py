"""TRL's SFTTrainer on packed documents of a model with windows, both refused by its own context parallelism.

torchrun --nproc-per-node 8 examples/long_context/sft.py --config examples/long_context/sft.yaml
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

from ringattn.integrations.trainer import RingMixin


class RingSFTTrainer(RingMixin, SFTTrainer):
    pass


script, settings, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
texts = load_dataset(script.dataset_name, split=script.dataset_train_split)
RingSFTTrainer(model.model_name_or_path, settings, train_dataset=texts, layout="balanced").train()
