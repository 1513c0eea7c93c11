// Second stage of every sum over rows: out (C,) <- partial (parts, C) f32, in an order that only `parts` decides.

constexpr int SUM_WARPS = 32;

// A block owns 32 columns; warp w adds the parts w, w + 32, ..., then the warps are added in order.
template <typename G>
__device__ __forceinline__ void sum_columns(G* out, const float* partial, int parts, int columns, bool add) {
    __shared__ float shared[SUM_WARPS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    float total = 0;
    if (column < columns) {
#pragma unroll 8
        for (int part = warp; part < parts; part += SUM_WARPS) total += partial[static_cast<i64>(part) * columns + column];
    }
    shared[warp][lane] = total;
    __syncthreads();
    if (warp || column >= columns) return;
    total = 0;
#pragma unroll
    for (int w = 0; w < SUM_WARPS; w++) total += shared[w][lane];
    out[column] = narrow<G>(add ? to_float(out[column]) + total : total);
}
