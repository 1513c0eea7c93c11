// AdaLoRA: what keeps A A^T and B^T B near the identity, how important each parameter is, and sums of that.
//
// orthogonality: one block, as the products of an adapter's rows are some thousand numbers. importance: a thread owns a
// number. importance_sums: a warp owns a row, or a thread a column of 128 rows. Every sum is made in an order of its own,
// whatever the grid. Not measured yet.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype of the coefficient, or of the weight), G (dtype of the gradient)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, TILE_ROWS = 128;

// the sum of a block in all its threads
template <typename S>
__device__ __forceinline__ S block_total(S x, S* warps) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    S total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total += warps[i];
    return total;
}

// coefficient (rank, every) <- gram (every, every), of which rank from `first` on, targets (count,)
extern "C" __global__ void __launch_bounds__(THREADS)
    orthogonality(T* coefficient, const float* gram, const int* targets, i64 count, float weight, int first, int present,
                  int rank, int every) {
    __shared__ float squares[THREADS / 32];
    __shared__ int counts[THREADS / 32];
    int trained = 0;
    for (i64 i = threadIdx.x; i < count; i += THREADS) trained += targets[i] >= 0;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < rank * rank; i += THREADS) {
        int row = i / rank, column = i % rank;
        float apart = gram[(first + row) * every + first + column] - (row == column && row < present ? 1.0f : 0.0f);
        sum += apart * apart;
    }
    float norm = sqrtf(block_total(sum, squares)), tokens = static_cast<float>(block_total(trained, counts));
    float factor = norm > 0.0f ? 2.0f * weight * tokens / norm : norm;
    for (int i = threadIdx.x; i < rank * every; i += THREADS) {
        int row = i / every, column = i % every - first;
        float value = 0.0f;
        if (column >= 0 && column < rank)
            value = factor * (gram[(first + row) * every + first + column] - (row == column && row < present ? 1.0f : 0.0f));
        coefficient[i] = narrow<T>(value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    importance(float* new_sensitivity, float* new_uncertainty, const float* sensitivity, const float* uncertainty,
               const T* weight, const G* grad, const float* scale, const float* apply, i64 count, float beta_1,
               float rest_1, float beta_2, float rest_2) {
    i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= count || *apply == 0.0f) return;
    float now = fabsf(to_float(weight[i]) * (to_float(grad[i]) * *scale));
    float s = beta_1 * sensitivity[i] + rest_1 * now;
    new_sensitivity[i] = s;
    new_uncertainty[i] = beta_2 * uncertainty[i] + rest_2 * fabsf(now - s);
}

// sums (rows,) <- products of (rows, columns)
extern "C" __global__ void __launch_bounds__(THREADS)
    importance_of_rows(float* sums, const float* sensitivity, const float* uncertainty, int rows, int columns) {
    int row = (blockIdx.x * THREADS + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    i64 from = static_cast<i64>(row) * columns;
    float sum = 0.0f;
    for (int i = lane; i < columns; i += 32) sum += sensitivity[from + i] * uncertainty[from + i];
    sum = warp_sum(sum);
    if (lane == 0) sums[row] = sum;
}

// sums (tiles, columns) <- products of (rows, columns); a block has a tile
extern "C" __global__ void __launch_bounds__(THREADS)
    importance_of_columns(float* sums, const float* sensitivity, const float* uncertainty, int rows, int columns) {
    i64 first = static_cast<i64>(blockIdx.x) * TILE_ROWS, end = min(first + TILE_ROWS, static_cast<i64>(rows));
    for (int column = threadIdx.x; column < columns; column += THREADS) {
        float sum = 0.0f;
        for (i64 row = first; row < end; row++) {
            i64 at = row * columns + column;
            sum += sensitivity[at] * uncertainty[at];
        }
        sums[static_cast<i64>(blockIdx.x) * columns + column] = sum;
    }
}
