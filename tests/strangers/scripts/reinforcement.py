"""The environment of the scripts that learn by reinforcement: a pole on a cart, as gym has it."""

import math
import random


class Pole:
    """A pole on a cart, which is pushed to the left or to the right."""

    def reset(self):
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        return list(self.state)

    def step(self, action):
        x, velocity, angle, turning = self.state
        force = 10.0 if action else -10.0
        push = (force + 0.05 * turning**2 * math.sin(angle)) / 1.1
        turned = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        moved = push - 0.05 * turned * math.cos(angle) / 1.1
        self.state = [x + 0.02 * velocity, velocity + 0.02 * moved, angle + 0.02 * turning, turning + 0.02 * turned]
        return list(self.state), 1.0, abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2
