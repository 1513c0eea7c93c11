// Virtual tokens: the last CHANNELS of each token at position START + p, p < VIRTUAL, of its document are row p of a trained
// matrix; and the gradient of that matrix, whose row p is the sum over documents. Positions may be ids of tokens instead.
//
// A warp owns a token: with a matrix it copies row p of that, without one zeros; out may be the memory of x, and then nothing
// else is moved. For the sums a block owns a row and 128 * N of its channels. It lists the tokens at its position among
// SPAN at a time, in order, and then adds them, so that the order of a sum is that of the tokens. Not measured yet.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype of activations), G (dtype of the gradient), W (channels of a token), CHANNELS, VIRTUAL, START, N (numbers
// per access), IN_PLACE

#include "common.cuh"
#include "constants"

constexpr int THREADS = 128, WARPS = THREADS / 32, EACH = 8, SPAN = THREADS * EACH, FIRST = W - CHANNELS;

// out, x (tokens, W), positions (tokens,), matrix (VIRTUAL, CHANNELS) or null
extern "C" __global__ void __launch_bounds__(THREADS)
    virtual_tokens(T* out, const T* x, const T* matrix, const int* positions, int tokens) {
    int token = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    int position = positions[token] - START;
    bool is_virtual = static_cast<u32>(position) < VIRTUAL;
    if (IN_PLACE && !is_virtual) return;
    out += static_cast<i64>(token) * W;
    x += static_cast<i64>(token) * W;
    if (matrix) matrix += static_cast<i64>(position) * CHANNELS;
#pragma unroll 2
    for (int c = (IN_PLACE ? FIRST : 0) + lane * N; c < W; c += 32 * N) {
        float v[N] = {};
        if (!is_virtual || c < FIRST) {
            load(x + c, v);
        } else if (matrix) {
            load(matrix + c - FIRST, v);
        }
        store(out + c, v);
    }
}

// d_matrix (VIRTUAL, CHANNELS) <- d_out (tokens, W), positions (tokens,); blockIdx: (piece of a row, row)
extern "C" __global__ void __launch_bounds__(THREADS)
    virtual_tokens_sum(G* d_matrix, const T* d_out, const int* positions, int tokens, int add) {
    __shared__ int found[SPAN], counts[WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.y;
    int channel = (blockIdx.x * THREADS + threadIdx.x) * N;
    d_out += FIRST + channel;
    float sum[N] = {};
    for (int start = 0; start < tokens; start += SPAN) {
        // A thread has EACH tokens side by side, so the list of all threads is in order.
        int mine = 0, first = start + threadIdx.x * EACH;
        u32 marks = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            bool is_here = first + i < tokens && positions[first + i] == START + row;
            marks |= static_cast<u32>(is_here) << i;
            mine += is_here;
        }
        int before = mine;  // up to and with this lane's
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xFFFFFFFFu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) counts[warp] = before;
        __syncthreads();
        int place = before - mine, total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) place += counts[i];
            total += counts[i];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (marks >> i & 1) found[place++] = first + i;
        __syncthreads();
        if (channel < CHANNELS) {
#pragma unroll 4
            for (int i = 0; i < total; i++) {
                float v[N];
                load(d_out + static_cast<i64>(found[i]) * W, v);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += v[j];
            }
        }
        __syncthreads();
    }
    if (channel >= CHANNELS) return;
    d_matrix += static_cast<i64>(row) * CHANNELS + channel;
#pragma unroll
    for (int j = 0; j < N; j++) d_matrix[j] = narrow<G>(add ? to_float(d_matrix[j]) + sum[j] : sum[j]);
}
