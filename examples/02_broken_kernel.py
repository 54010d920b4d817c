"""A kernel with a missing barrier, and what the emulator says of it. Needs a C++ compiler and no GPU.

python examples/02_broken_kernel.py
"""

import os

os.environ["TKJIT_EMULATE_CHECK"] = "1"

import torch

import tkjit
from tkjit._plan import empty_like, plan, planned
from tkjit._template import Template

SOURCE = """
#include "tk/tk.cuh"

// Turns every row of 256 round. The barrier that the comment speaks of is not there.
__global__ void reverse(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(tk::shared_memory(1024));
    s[threadIdx.x] = x[256 * blockIdx.x + threadIdx.x];
    // tk::sync_block();  // the row is written
    y[256 * blockIdx.x + threadIdx.x] = s[255 - threadIdx.x];
}
"""


@planned
def reverse(x):
    y = empty_like(x)
    kernel = Template.from_source(SOURCE, "reverse").kernel("reverse")
    return plan(y, kernel.launch(grid=x.shape[0], block=256, smem=1024, args=(y, x)))


def main():
    x = torch.arange(1024.0).view(4, 256)
    try:
        reverse(x)
    except tkjit.EmulatorError as error:
        print(error)


if __name__ == "__main__":
    main()
