// What norms over the last axis share. GROUP warps own a row and hold it in registers (VPT accesses to a lane), GROUPS
// groups make a block, ROWS rows belong to a block. A source says before it includes this whether the mean is subtracted
// (CENTERED), whether there is a bias (BIAS), and whether the norm is added to a residual (ADDED).
//
// norm_forward.cuh and norm_backward.cuh are the bodies of kernels, which have what they name as parameters or as null
// pointers. As functions they were compiled to another order of instructions in nearly every variant.

constexpr int THREADS = 32 * GROUP * GROUPS, PITCH = tile_pitch(C), STEP = 32 * GROUP * N;
static_assert(VPT * STEP >= C, "a row fits the group's registers");

// the sum over a group's threads; `slot` alternates so that one barrier is enough
__device__ __forceinline__ float group_sum(float x, float (*shared)[GROUPS][GROUP], int slot) {
    x = warp_sum(x);
    if constexpr (GROUP > 1) {
        int group = threadIdx.x / (32 * GROUP), warp = threadIdx.x / 32 % GROUP;
        if (threadIdx.x % 32 == 0) shared[slot][group][warp] = x;
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * GROUP) : "memory");
        x = 0;
#pragma unroll
        for (int w = 0; w < GROUP; w++) x += shared[slot][group][w];
    }
    return x;
}
