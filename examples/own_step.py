"""The loop runs any step function, here Newton's method."""

import rein


def newton(state):
    """Take one step toward the square root of the number in the batch."""
    guess = state.step_state
    return guess - (guess * guess - state.batch) / (2 * guess)


loop = rein.Loop(newton)
loop.metric("residual", lambda state: abs(state.step_state**2 - state.batch), reduce="last")
rein.early_stop(loop, "residual", mode="min", patience=0)

for state in loop.stream([2.0], epochs=50, init=1.0):
    print(f"epoch {state.epoch}: {state.step_state:.15f}, residual {state.metrics['residual']:.1e}")
print(state.status, "-", state.reason)
