"""Lightning's example of PPO: an iterable dataset that plays an environment with the module that is trained.

What it yields follows from the weights when its epoch began: it is saved between epochs.
"""

import lightning.pytorch as pl
import lightning_models
import torch
from reinforcement import Pole
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset


class ExperienceSourceDataset(IterableDataset):
    def __init__(self, generate_batch):
        self.generate_batch = generate_batch

    def __iter__(self):
        return self.generate_batch()


class PPOLightning(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.steps_per_epoch, self.gamma, self.clip_ratio = 40, 0.99, 0.2
        self.env = Pole()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.batch_states, self.batch_actions, self.batch_qvals, self.batch_logp = [], [], [], []
        self.ep_rewards, self.epoch_rewards = [], []
        self.avg_reward = 0
        self.state = torch.FloatTensor(self.env.reset())

    def generate_trajectory_samples(self):
        for step in range(self.steps_per_epoch):
            with torch.no_grad():
                pi = Categorical(logits=self.actor(self.state))
                action = pi.sample()
            next_state, reward, done = self.env.step(int(action))
            self.batch_states.append(self.state)
            self.batch_actions.append(action)
            self.batch_logp.append(pi.log_prob(action))
            self.ep_rewards.append(reward)
            self.state = torch.FloatTensor(next_state)
            epoch_end = step == (self.steps_per_epoch - 1)
            if epoch_end or done:
                total, discounted = 0.0, []
                for each in reversed(self.ep_rewards):
                    total = total * self.gamma + each
                    discounted.insert(0, total)
                self.batch_qvals += discounted
                self.epoch_rewards.append(sum(self.ep_rewards))
                self.ep_rewards = []
                self.state = torch.FloatTensor(self.env.reset())
            if epoch_end:
                yield from zip(self.batch_states, self.batch_actions, self.batch_logp, self.batch_qvals, strict=True)
                for each in (self.batch_states, self.batch_actions, self.batch_logp, self.batch_qvals):
                    each.clear()
                self.avg_reward = sum(self.epoch_rewards) / self.steps_per_epoch
                self.epoch_rewards.clear()

    def training_step(self, batch):
        state, action, logp_old, qval = batch
        self.log("avg_reward", self.avg_reward, on_step=False, on_epoch=True)
        optimizer_actor, optimizer_critic = self.optimizers()
        adv = qval.float() - self.critic(state).squeeze(1).detach()
        ratio = torch.exp(Categorical(logits=self.actor(state)).log_prob(action) - logp_old)
        loss_actor = -torch.min(ratio * adv, torch.clamp(ratio, 1 - self.clip_ratio, 1 + self.clip_ratio) * adv).mean()
        self.manual_backward(loss_actor)
        optimizer_actor.step()
        optimizer_actor.zero_grad()
        loss_critic = (qval.float() - self.critic(state).squeeze(1)).pow(2).mean()
        self.manual_backward(loss_critic)
        optimizer_critic.step()
        optimizer_critic.zero_grad()
        return {"loss": loss_critic.detach()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.actor.parameters(), lr=3e-3), torch.optim.Adam(self.critic.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(ExperienceSourceDataset(self.generate_trajectory_samples), batch_size=8)


trainer = lightning_models.trainer(
    lightning_models.checkpoints(every_n_train_steps=None, every_n_epochs=1), max_epochs=6
)
model = PPOLightning()
trainer.fit(model)
lightning_models.end(trainer, model)
