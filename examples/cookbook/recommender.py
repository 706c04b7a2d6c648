"""Clicks from ten tables, of which each replica holds a part; one file to serve.

python examples/cookbook/recommender.py
tfdp launch --workers 2 examples/cookbook/recommender.py
"""

import tfdp

tfdp.quiet()

import keras
import numpy as np

TABLES, WORDS, WIDTH, CLICKS = 10, 5000, 16, 8192
keras.utils.set_random_seed(1)
# A word is liked or not; a row is clicked if most of its words are liked. Some words
# are frequent, most are rare.
generator = np.random.default_rng(1)
drawn = generator.pareto(1.0, (CLICKS, TABLES)) * 5
words = np.minimum(drawn, WORDS - 1).astype("int32")
is_liked = generator.random((TABLES, WORDS)) < 0.5
liked = is_liked[np.arange(TABLES), words].sum(axis=1)
clicks = (liked > TABLES / 2).astype("float32")
numbers = generator.normal(size=(CLICKS, 4)).astype("float32")


def build() -> keras.Model:
    columns = [keras.Input((), dtype="int32", name=f"c{n}") for n in range(TABLES)]
    given = keras.Input((4,), name="numbers")
    rows = [keras.layers.Embedding(WORDS, WIDTH)(column) for column in columns]
    hidden = keras.layers.Concatenate()([*rows, keras.layers.Dense(WIDTH)(given)])
    hidden = keras.layers.Dense(32, "relu")(hidden)
    return keras.Model([*columns, given], keras.layers.Dense(1, "sigmoid")(hidden))


def arrays(start: int, stop: int) -> dict[str, np.ndarray]:
    columns = {f"c{n}": words[start:stop, n] for n in range(TABLES)}
    return {**columns, "numbers": numbers[start:stop]}


strategy = tfdp.auto_strategy(cpu_devices=2, shard="parameters")
with strategy.scope():
    model = build()
    # Replicas exchange rows within the step, which XLA cannot compile.
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", jit_compile=False)
split = CLICKS * 7 // 8
model.fit(arrays(0, split), clicks[:split], batch_size=512, epochs=5, verbose=2)

# Every worker takes part, because each holds a part; worker 0 writes to your path.
path = "recommender.keras" if strategy.is_chief else "recommender-of-others.keras"
model.save(path)

# The file is one of plain Keras: this is how another program serves it.
served = keras.models.load_model(path)
seen = served.predict(arrays(split, CLICKS), batch_size=512, verbose=0)[:, 0]
right = ((seen > 0.5) == clicks[split:]).mean()
if strategy.is_chief:
    print(f"{right:.1%} of the clicks that it has not seen are right")
