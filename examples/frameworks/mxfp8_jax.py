"""One layer, forward and backward under the MXFP8 recipe, in JAX.

python -m examples.frameworks.mxfp8_jax
"""

import jax
import jax.numpy as jnp

import blockscale.jax as bsj


def main() -> jax.Array:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (32, 256))
    weight, bias = jax.random.normal(keys[1], (256, 128)) / 16, jnp.zeros(128)

    @jax.jit
    @jax.value_and_grad
    def step(weight: jax.Array) -> jax.Array:
        return jnp.square(bsj.linear(x, weight, bias, format="mxfp8")).mean()

    loss, grad = step(weight)
    print(f"loss {loss:.4f}, gradient {jnp.linalg.norm(grad):.4f}")
    return grad


if __name__ == "__main__":
    main()
