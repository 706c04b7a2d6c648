"""A policy by REINFORCE: log-probabilities of actions, weighted by advantages."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ACTIONS, GAMMA = 3, 0.95
rng = np.random.default_rng(0)


def play(policy, episodes=12, steps=16):
    """Plays a game: at each step one of the three states is the right action."""
    states = rng.normal(size=(episodes, steps, 4)).astype("float32")
    logits = policy(states.reshape(-1, 4)).numpy().reshape(episodes, steps, ACTIONS)
    noise = rng.gumbel(size=logits.shape)
    actions = np.argmax(logits + noise, axis=-1)
    rewards = (actions == states[..., :ACTIONS].argmax(-1)).astype("float32")
    returns = np.zeros_like(rewards)
    total = np.zeros(episodes, "float32")
    for step in reversed(range(steps)):
        total = rewards[:, step] + GAMMA * total
        returns[:, step] = total
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    return states.reshape(-1, 4), actions.reshape(-1), advantages.reshape(-1)


class Policy(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(32, activation="tanh")
        self.logits = layers.Dense(ACTIONS)

    def call(self, states):
        return self.logits(self.hidden(states))

    def train_step(self, data):
        states, actions, advantages = data
        with tf.GradientTape() as tape:
            log_probabilities = ops.log_softmax(self(states, training=True))
            chosen = ops.sum(ops.one_hot(actions, ACTIONS) * log_probabilities, axis=-1)
            policy_loss = -ops.sum(chosen * advantages)
            entropy = -ops.sum(ops.exp(log_probabilities) * log_probabilities)
            loss = (policy_loss - 0.01 * entropy) / 64
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"loss": loss}


policy = Policy()
policy.compile(keras.optimizers.Adam(1e-2))
states, actions, advantages = play(policy)
policy.fit(states, actions, sample_weight=advantages, batch_size=64, epochs=2)
