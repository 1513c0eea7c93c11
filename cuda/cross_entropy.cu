// Cross-entropy of each row of logits (rows, VP) against its target, and its gradient in place of the logits:
// loss = lse - logits[target] + z_loss lse^2, d_logits = softmax * (1 + 2 z_loss lse) - onehot(target), lse = log sum exp.
// Columns from V on are padding: no probability, gradient 0. Target -100: loss 0, gradient 0, logits not even read.
// hits is 1 where the target is the first of the largest logits and the loss a number. A thread reads its columns in order,
// so its maximum after each access before the target's is that of columns before the target.
//
// CLUSTER blocks own a row and hold it in registers (HELD accesses to a thread), so it is read once: the blocks exchange
// only a maximum and a sum, through distributed shared memory (sm_90 and later). A row that does not fit in registers
// (HELD 0; or no clusters) is read twice by one block, the second time mostly from L2. Several blocks share a
// multiprocessor, so that one reads while another writes.
//
// Measured on an H200 at (8192, 151936) bf16: 3659 GB/s, 88% of a copy; other cluster shapes: docs/kernels/memory-bound.md.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, V, VP, N, THREADS, CLUSTER, HELD, FORMS (of d_logits: value, fp8 rows, amax; 0: not wanted), E4M3,
// HITS (0: not wanted)

#include "common.cuh"
#include "constants"
#include "cluster.cuh"
#include "forms.cuh"

constexpr int IGNORED = -100, WARPS = THREADS / 32;
constexpr float LOG2_E = 1.4426950408889634f;
#define NONE __uint_as_float(0xff800000u)  // -infinity

// 2^x; one instruction, where exp2f adds three for subnormal results, which are no probability that counts
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// (m, s): the sum of exp over some logits is s * exp(m); s is 0 and m -inf for none
struct Total {
    float m, s;
};

__device__ __forceinline__ Total both(Total a, Total b) {
    float m = fmaxf(a.m, b.m);
    // an empty side must not make -inf - -inf
    float x = a.s == 0 ? 0 : a.s * power((a.m - m) * LOG2_E), y = b.s == 0 ? 0 : b.s * power((b.m - m) * LOG2_E);
    return {m, x + y};
}

// the total of an access at `column`; padding counts as -inf
__device__ __forceinline__ void add_access(Total& total, float (&v)[N], int column) {
    float m = total.m;
    if (V < VP && column + N > V) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (column + j >= V) v[j] = NONE;
    }
#pragma unroll
    for (int j = 0; j < N; j++) m = fmaxf(m, v[j]);
    if (m == NONE) {
#pragma unroll
        for (int j = 0; j < N; j++) total.s += v[j] == NONE ? 0.0f : v[j];  // fmaxf leaves NaN out: none may be lost
        return;
    }
    float s = total.s == 0 ? 0 : total.s * power((total.m - m) * LOG2_E), shift = -m * LOG2_E;
#pragma unroll
    for (int j = 0; j < N; j++) s += power(fmaf(v[j], LOG2_E, shift));
    total = {m, s};
}

__device__ __forceinline__ Total warp_total(Total t) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        t = both(t, {__shfl_xor_sync(0xffffffffu, t.m, step), __shfl_xor_sync(0xffffffffu, t.s, step)});
    return t;
}

// the total of all threads of all blocks of the cluster, and whether any of them has been `beaten`
__device__ __forceinline__ Total row_total(Total t, bool& beaten) {
    __shared__ float warps[2][WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    t = warp_total(t);
    if (lane == 0) warps[0][warp] = t.m, warps[1][warp] = t.s;
    if constexpr (HITS) {
        beaten = __syncthreads_or(beaten);
    } else {
        __syncthreads();
    }
    t = lane < WARPS ? Total{warps[0][lane], warps[1][lane]} : Total{NONE, 0};
    t = warp_total(t);
    if constexpr (CLUSTER == 1) return t;
    __shared__ float blocks[2 + HITS][CLUSTER];
    cluster_wait();  // every block of the cluster has begun
    if (threadIdx.x < CLUSTER) {
        store_remote(remote(&blocks[0][cluster_rank()], threadIdx.x), t.m);
        store_remote(remote(&blocks[1][cluster_rank()], threadIdx.x), t.s);
        if constexpr (HITS) store_remote(remote(&blocks[2][cluster_rank()], threadIdx.x), beaten ? 1.0f : 0.0f);
    }
    cluster_arrive();
    cluster_wait();
    t = {blocks[0][0], blocks[1][0]};
#pragma unroll
    for (int i = 1; i < CLUSTER; i++) t = both(t, {blocks[0][i], blocks[1][i]});
    if constexpr (HITS) {
#pragma unroll
        for (int i = 0; i < CLUSTER; i++) beaten |= blocks[2][i] != 0;
    }
    return t;
}

__device__ __forceinline__ void gradient(float (&v)[N], int column, float shift, float factor, int target) {
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = power(fmaf(v[j], LOG2_E, shift)) * factor;
    if (static_cast<u32>(target - column) < N || (V < VP && column + N > V)) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (column + j == target) v[j] -= 1.0f;
            if (column + j >= V) v[j] = 0;
        }
    }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS)
    cross_entropy(OUTPUT_PARAMETERS(T, d_logits), float* loss, int* hits, const T* logits, const int* targets,
                  float z_loss) {
    constexpr int STRIDE = THREADS * CLUSTER * N;
    i64 row = blockIdx.x / CLUSTER;
    const T* from = logits + row * VP;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, d_logits));
    int target = targets[row], first = (cluster_rank() * THREADS + threadIdx.x) * N;
    if (target == IGNORED) {
        if (loss && first == 0) loss[row] = 0;
        if (HITS && first == 0) hits[row] = 0;
        if constexpr (FORMS != 0) {
            float zero[N] = {};
            for (int column = first; column < VP; column += STRIDE) sink.put(row * VP + column, zero, nullptr);
        }
        return;
    }
    if constexpr (CLUSTER > 1) cluster_arrive();
    // before the exchange, and so before any block writes
    float logit = HITS || first == 0 ? to_float(from[target]) : 0;
    int start = target - target % N;  // of the access that has the target
    bool beaten = HITS && threadIdx.x < target - start && to_float(from[start + threadIdx.x]) >= logit;
    Total total = {NONE, 0};
    Pack<T, N> held[HELD > 0 ? HELD : 1];
    float v[N];
    if constexpr (HELD > 0) {
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (first + i * STRIDE < VP) held[i].load(from + first + i * STRIDE);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (first + i * STRIDE >= VP) break;
            held[i].get(v);
            add_access(total, v, first + i * STRIDE);
            if (HITS && first + i * STRIDE < start) beaten |= total.m >= logit;
        }
    } else {
#pragma unroll 4
        for (int column = first; column < VP; column += STRIDE) {
            load(from + column, v);
            add_access(total, v, column);
            if (HITS && column < start) beaten |= total.m >= logit;
        }
    }
    total = row_total(total, beaten);
    float lse = total.m + logf(total.s), shift = -total.m * LOG2_E, own = lse + z_loss * lse * lse - logit;
    if (loss && first == 0) loss[row] = own;
    if (HITS && first == 0) hits[row] = !beaten && logit == total.m && own == own;  // NaN is left out of maxima
    if constexpr (FORMS != 0) {
        float factor = (1.0f + 2.0f * z_loss * lse) / total.s;
        if constexpr (HELD > 0) {
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                int column = first + i * STRIDE;
                if (column >= VP) break;
                held[i].get(v);
                gradient(v, column, shift, factor, target);
                sink.put(row * VP + column, v, nullptr);
            }
        } else {
#pragma unroll 4
            for (int column = first; column < VP; column += STRIDE) {
                load(from + column, v);
                gradient(v, column, shift, factor, target);
                sink.put(row * VP + column, v, nullptr);
            }
        }
        sink.finish();
    }
}
