"""Train a small JAX model from Parquet; after a kill at any moment, it resumes at the exact row and step.

python examples/train_jax.py [PATH]        data with columns x, y and z; without PATH, creates a small dataset
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import strata


def write_rows(path: str) -> str:
    x, y = np.random.default_rng(0).random((2, 10_000), np.float32)
    pq.write_table(pa.table({"x": x, "y": y, "z": np.sin(3 * x) * y}), path, row_group_size=1_000)
    return path


def fresh_state(seed: int) -> dict:
    key, one, other = jax.random.split(jax.random.key(seed), 3)
    params = {"hidden": jax.random.normal(one, (2, 64)), "out": jax.random.normal(other, (64,)) / 8}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "key": key}


@jax.jit
def train_step(state: dict, inputs: jax.Array, wanted: jax.Array) -> tuple[dict, jax.Array]:
    key, noise = jax.random.split(state["key"])
    inputs = inputs + 0.01 * jax.random.normal(noise, inputs.shape)

    def loss_of(params: dict) -> jax.Array:
        return jnp.mean((jnp.tanh(inputs @ params["hidden"]) @ params["out"] - wanted) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.03 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "key": key}, loss


with tempfile.TemporaryDirectory() as temporary:
    path = sys.argv[1] if len(sys.argv) > 1 else write_rows(f"{temporary}/rows.parquet")
    with strata.init(checkpoints=None if len(sys.argv) > 1 else f"{temporary}/checkpoints", every=50) as ctx:
        loader = ctx.dataloader(path, batch_size=128, shuffle=True, output_format="numpy")
        progress = ctx.restore(fresh_state(seed=1))
        state, step = progress.state, progress.step  # JAX arrays are immutable, so restore returns new ones
        print("begins after step", step, flush=True)
        for _ in ctx.epochs(3):
            for batch in loader:
                state, loss = train_step(state, np.stack([batch["x"], batch["y"]], axis=1), batch["z"])
                step += 1
                ctx.report(step=step, loss=loss.item())
                ctx.maybe_checkpoint(state)
                if step % 50 == 0:
                    print(f"step {step} loss {loss:.5f}", flush=True)
        ctx.checkpoint(state)
