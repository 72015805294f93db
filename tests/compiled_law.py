"""Law 8 for one entry: `torch.compile(fullgraph=True)` equals eager. Run as: compiled_law.py NAME BACKEND."""

import sys

import torch

from test_laws import Model

torch.set_num_threads(1)
name, backend = sys.argv[1:]
torch.manual_seed(0)
model = Model(name, torch.float32)
eager = model.module
x, z = model.input(), model.input().requires_grad_()
expected = model.run(x)
expected_gradients = torch.autograd.grad(model.run(z).square().sum(), [z, *eager.parameters()])

model.module = torch.compile(eager, fullgraph=True, backend=backend)
torch.testing.assert_close(model.run(x), expected, rtol=1e-5, atol=1e-5)
gradients = torch.autograd.grad(model.run(z).square().sum(), [z, *eager.parameters()])
for compiled, plain in zip(gradients, expected_gradients, strict=True):
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max() + 1))
