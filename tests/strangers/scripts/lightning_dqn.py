"""Lightning's example of deep Q learning: a replay buffer and an environment beside the module, a target network."""

import random
from collections import deque, namedtuple

import lightning.pytorch as pl
import lightning_models
import torch
from reinforcement import Pole
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

Experience = namedtuple("Experience", ["state", "action", "reward", "done", "new_state"])


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def sample(self, batch_size):
        indices = random.sample(range(len(self.buffer)), batch_size)
        states, actions, rewards, dones, next_states = zip(*(self.buffer[index] for index in indices), strict=True)
        return (
            torch.tensor(states),
            torch.tensor(actions),
            torch.tensor(rewards, dtype=torch.float32),
            torch.tensor(dones, dtype=torch.bool),
            torch.tensor(next_states),
        )


class RLDataset(IterableDataset):
    def __init__(self, buffer, sample_size):
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self):
        yield from zip(*self.buffer.sample(self.sample_size), strict=True)


class Agent:
    def __init__(self, env, replay_buffer):
        self.env, self.replay_buffer = env, replay_buffer
        self.state = self.env.reset()

    @torch.no_grad()
    def play_step(self, net, epsilon):
        action = random.randrange(2) if random.random() < epsilon else int(net(torch.tensor([self.state])).argmax())
        new_state, reward, done = self.env.step(action)
        self.replay_buffer.buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done


class DQNLightning(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.buffer = ReplayBuffer(60)
        self.agent = Agent(Pole(), self.buffer)
        self.total_reward = self.episode_reward = 0
        for _ in range(60):
            self.agent.play_step(self.net, 1.0)

    def training_step(self, batch, nb_batch):
        epsilon = max(0.01, 1.0 - (self.global_step + 1) / 30)
        reward, done = self.agent.play_step(self.net, epsilon)
        self.episode_reward += reward
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0
        if self.global_step % 10 == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log("total_reward", float(self.total_reward))
        return nn.functional.mse_loss(values, next_values * 0.99 + rewards)

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net.parameters(), lr=1e-2)]

    def train_dataloader(self):
        return DataLoader(RLDataset(self.buffer, 40), batch_size=4)


trainer = lightning_models.trainer(lightning_models.checkpoints(every_n_train_steps=4), max_epochs=4)
model = DQNLightning()
trainer.fit(model)
lightning_models.end(trainer, model, buffer=[list(map(float, each.state)) for each in model.buffer.buffer])
