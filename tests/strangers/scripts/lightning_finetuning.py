"""As Lightning's computer_vision_fine_tuning example: the backbone is frozen, and thawed by milestones."""

import lightning_models
import torch
from lightning.pytorch.callbacks import BaseFinetuning


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones=(1, 2)):
        super().__init__()
        self.milestones = milestones

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(pl_module.backbone[-2:], optimizer, initial_denom_lr=10)
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(pl_module.backbone[:-2], optimizer, initial_denom_lr=10)


class Transferred(lightning_models.Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)]


trainer = lightning_models.trainer(lightning_models.checkpoints(), MilestonesFinetuning(), max_epochs=4)
lightning_models.fit(trainer, Transferred(), lightning_models.Blobs())
